"""The tree of blocks as HTML, for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fractrain_fx.summary.rows import COLUMNS, Row

__all__ = ["table"]

# Colours are inherited from the notebook, so that the table is readable in light and dark themes.
_CELL = "padding:2px 10px;background:transparent;color:inherit;"
_LINE = "border-bottom:1px solid rgba(128,128,128,.35);"
_WEIGHT = {"module": "font-weight:600", "block": "font-weight:400", "op": "font-weight:400;opacity:.8"}


def table(title: str, rows: Sequence[Row], notes: Sequence[str], loud: str = "") -> str:
    """A table whose first column is indented by depth, and the notes below it; ``loud`` is a line above it."""
    heads = "".join(
        f'<th scope="col" style="{_CELL}{_LINE}text-align:{_side(i)}">{escape(column)}</th>'
        for i, column in enumerate(COLUMNS)
    )
    lines = "".join(_line(row, depth) for top in rows for row, depth in top.walk())
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return (
        '<div style="overflow-x:auto;color:inherit">'
        f"{f'<p><strong>{escape(loud)}</strong></p>' if loud else ''}"
        f'<table style="color:inherit;border-collapse:collapse;font-variant-numeric:tabular-nums">'
        f'<caption style="text-align:left;font-weight:600;color:inherit">{escape(title)}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table><ul>{items}</ul></div>"
    )


def _line(row: Row, depth: int) -> str:
    name, *rest = (escape(cell).replace("\n", "<br/>") for cell in row.cells)
    indent = f"padding-left:{10 + 18 * depth}px;text-align:left;{_WEIGHT[row.kind]}"
    cells = "".join(f'<td style="{_CELL}text-align:{_side(i)}">{cell}</td>' for i, cell in enumerate(rest, start=1))
    return f'<tr><th scope="row" style="{_CELL}{indent}">{name}</th>{cells}</tr>'


def _side(place: int) -> str:
    return "left" if COLUMNS[place] in ("block", "skip", COLUMNS[-1]) else "right"
