"""Sensitivities as a table of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fractrain_fx.numerics.sensitivity.result import Sensitivities, Sensitivity
from fractrain_fx.numerics.sensitivity.rounded import OPERANDS
from fractrain_fx.numerics.table import shortened

__all__ = ["sensitivity_table"]

_SHOWN = (3, 4, 6)  # bits
_NAME = 24  # characters


def sensitivity_table(found: Sensitivities) -> Iterator[RenderableType]:
    """A row for each measured op, and a line that explains the columns."""
    known = sorted({row.bits for row in found.rows})
    shown = [bits for bits in _SHOWN if bits in known] or known[:3]
    table = Table(
        title=f"{found.model}: loss {found.loss:.4g} in float",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("op", no_wrap=True, max_width=_NAME)
    for operand in OPERANDS:
        for bits in shown:
            table.add_column(f"{operand} {bits}", justify="right", no_wrap=True)
    for op in found.measured:
        rows = {(row.operand, row.bits): row for row in found.rows if row.op == op.name}
        cells = [_cell(rows.get((operand, bits))) for operand in OPERANDS for bits in shown]
        table.add_row(Text(shortened(op.name, _NAME)), *cells)
    yield table
    yield Text(
        "x, w: expected change of the loss if this op's activation or weight alone is rounded to so many bits. "
        "g: the noise of its rounded gradient, in per cent of the harm that the batch's own noise does in a step."
    )


def _cell(row: Sensitivity | None) -> str:
    if row is None:
        return ""
    return _short(100 * row.noise) if row.noise is not None else _short(row.change or 0.0)


def _short(value: float) -> str:
    """A number in five characters."""
    if value == 0 or 0.01 <= abs(value) < 1000:
        return f"{value:.2f}"[:5]
    digits, exponent = f"{value:.0e}".split("e")
    return f"{digits}e{int(exponent)}"
