"""The tree of blocks on a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fractrain_fx.summary.numbers import short_number
from fractrain_fx.summary.rows import COLUMNS, Row

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

__all__ = ["LOUD", "WIDE", "columns_or", "fits", "table"]

LOUD = "bold yellow"
"""The style of a line that a reader must not miss."""

WIDE = 100
"""Characters below which a table is narrow."""

_LAST = 24  # characters of the last column, which wraps: "float: first contraction"
_ANY = 10_000  # characters, in which every table fits
_SHORTEST = 16  # characters of a name
_NUMBERS = frozenset({"ops", "MACs", "share", "gate params", "gate MACs"})


def columns_or(width: int) -> int | None:
    """A width for a console that writes to no terminal; ``None``, which stands for ``COLUMNS``, if that is set."""
    return None if "COLUMNS" in os.environ else width


def table(title: str, rows: Sequence[Row], width: int) -> Table:
    """A rich table whose first column is a tree, without empty columns.

    In a narrow terminal it has no columns for the gates, nor for skip paths where names need the room. Names leave out
    those of the row above them.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    narrow, last = width < WIDE, len(COLUMNS) - 1
    lines = list(_lines(rows, "", "" if narrow else None))
    shown = [place for place in range(1, len(COLUMNS)) if any(cells[place] for *_, cells in lines)]
    if narrow:
        shown = [place for place in shown if not COLUMNS[place].startswith("gate ")]
    room = _room(shown, lines, width)
    if narrow and room < max(len(guide) + len(name) for guide, name, _ in lines):
        shown = [place for place in shown if COLUMNS[place] != "skip"]
        room = _room(shown, lines, width)
    grid = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for place in (0, *shown):
        heading = COLUMNS[place].replace("gate ", "gate\n")
        right = COLUMNS[place] in _NUMBERS
        grid.add_column(heading, justify="right" if right else "left", no_wrap=place < last, vertical="top")
    for guide, name, cells in lines:
        grid.add_row(_fitted(guide, name, room), *(Text(cells[place]) for place in shown))
    return grid


def fits(table: Table, console: Console, width: int) -> bool:
    """Whether a table needs no more than ``width`` characters, with nothing wrapped that may not wrap."""
    from rich.measure import Measurement

    return Measurement.get(console, console.options.update_width(_ANY), table).minimum <= width


def _room(shown: Sequence[int], lines: Sequence[tuple[str, str, tuple[str, ...]]], width: int) -> int:
    """The characters that the other columns leave to the first."""
    taken = sum(max(len(COLUMNS[place]), *(len(cells[place]) for *_, cells in lines)) + 2 for place in shown[:-1])
    return width - taken - _LAST - 2  # at the edges


def _fitted(guide: str, name: str, longest: int) -> Text:
    """A name behind its lines of the tree; the end of a long one, which tells it from its neighbours."""
    from rich.text import Text

    room = max(longest - len(guide), _SHORTEST)
    return Text(guide + (name if len(name) <= room else f"…{name[1 - room :]}"))


def _lines(rows: Sequence[Row], indent: str, above: str | None) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Each row's lines of the tree, its name, and its cells.

    Unless ``above`` is ``None``, lines and numbers are short, and names leave out that of the row above.
    """
    narrow = above is not None
    wide = "" if narrow else "── "
    for index, row in enumerate(rows):
        last = index == len(rows) - 1
        name, *_ = cells = row.cells
        if narrow and row.macs is not None:
            cells = tuple(
                short_number(row.macs) if head == "MACs" else cell for head, cell in zip(COLUMNS, cells, strict=True)
            )
        yield f"{indent}{'└' if last else '├'}{wide or ' '}", name.removeprefix(f"{above}."), cells
        below = (" " if last else "│") + " " * max(len(wide), 1)
        yield from _lines(row.below, indent + below, row.name if narrow else None)
