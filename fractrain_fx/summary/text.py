"""The tree of blocks on a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fractrain_fx.summary.rows import COLUMNS, Row

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["columns_or", "table"]

_WIDE = 100  # characters
_NUMBERS = frozenset({"ops", "MACs", "share", "gate params", "gate MACs"})


def columns_or(width: int) -> int | None:
    """A width for a console that writes to no terminal; ``None``, which stands for ``COLUMNS``, if that is set."""
    return None if "COLUMNS" in os.environ else width


def table(title: str, rows: Sequence[Row], width: int) -> Table:
    """A rich table whose first column is a tree, without empty columns; in a narrow terminal without the gates' own."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    lines = [(guide + cells[0], cells) for guide, cells in _lines(rows, "")]
    shown = [place for place in range(len(COLUMNS)) if any(cells[place] for _, cells in lines)]
    if width < _WIDE:
        shown = [place for place in shown if not COLUMNS[place].startswith("gate ")]
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for place in shown:
        heading = COLUMNS[place].replace("gate ", "gate\n")
        right = COLUMNS[place] in _NUMBERS
        made.add_column(heading, justify="right" if right else "left", no_wrap=place < len(COLUMNS) - 1, vertical="top")
    for name, cells in lines:
        made.add_row(*(Text(name if place == 0 else cells[place]) for place in shown))
    return made


def _lines(rows: Sequence[Row], indent: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each row with the lines of the tree before it."""
    for index, row in enumerate(rows):
        last = index == len(rows) - 1
        yield f"{indent}{'└── ' if last else '├── '}", row.cells
        yield from _lines(row.below, indent + ("    " if last else "│   "))
