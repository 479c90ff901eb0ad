"""Break a tall picture into columns."""

from __future__ import annotations

import math

from fractrain_fx.drawing.picture import ArrowKind, Picture, Shape

__all__ = ["in_columns"]

# Number of rows before a second column starts.
_TALLEST = 30


def in_columns(picture: Picture) -> tuple[Picture, dict[str, int]]:
    """A picture broken into columns, and the column of each of its shapes.

    An arrow to another column ends at a connector, a letter in a circle, and continues at a connector with the same
    letter, so that no arrow crosses the whole drawing.
    """
    column = _columns(picture)
    broken = Picture(picture.title, dict(picture.shapes), blocks=picture.blocks)
    letters: dict[str, str] = {}
    for arrow in picture.arrows:
        start, end = column[arrow.source], column[arrow.target]
        if start == end:
            broken.join(arrow.source, arrow.target, arrow.kind)
            continue
        if arrow.source not in letters:
            letters[arrow.source] = _letter(len(letters))
            kind: ArrowKind = arrow.kind if arrow.kind in ("state", "cost") else "data"
            broken.join(arrow.source, _connector(broken, column, f"{letters[arrow.source]} out", start), kind)
        entering = _connector(broken, column, f"{letters[arrow.source]} in {end}", end)
        broken.join(entering, arrow.target, arrow.kind)
    return broken, column


def _connector(picture: Picture, column: dict[str, int], name: str, place: int) -> str:
    key = f"connector {name}"
    column[key] = place
    return picture.add(Shape(key, "connector", name.split()[0]))


def _letter(index: int) -> str:
    """A, B, ..., Z, AA, AB, ..."""
    letter = chr(ord("A") + index % 26)
    return letter if index < 26 else _letter(index // 26 - 1) + letter


def _columns(picture: Picture) -> dict[str, int]:
    """The column of each shape: shapes in order of execution, cut into equal parts at starts of blocks."""
    rows = [_rows(shape) for shape in picture.shapes.values()]
    count = max(1, round(math.sqrt(sum(rows) / _TALLEST)))
    placed: dict[str, int] = {}
    of_block: dict[str, int] = {}
    column = height = 0
    for shape, tall in zip(picture.shapes.values(), rows, strict=True):
        if shape.block not in of_block and height >= (column + 1) * sum(rows) / count:
            column += 1
        if tall:
            placed[shape.id] = of_block.get(shape.block or "", column)
            if shape.block:
                of_block.setdefault(shape.block, column)
        height += tall
    for shape in picture.shapes.values():
        if shape.id not in placed:
            placed[shape.id] = of_block[shape.block] if shape.block else column if shape.kind == "cost" else 0
    return placed


def _rows(shape: Shape) -> int:
    return 0 if shape.kind in ("controller", "stage", "cost", "gate") else 2 if shape.kind in ("block", "op") else 1
