"""An allocation as a table of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from fractrain_fx.numerics.allocation.allocate import Allocation

__all__ = ["allocation_table"]

_UNITS = {"cp": "% of training at 32 bits", "joules": "joules a step", "seconds": "seconds a step"}


def allocation_table(found: Allocation) -> Iterator[RenderableType]:
    """A row for each op, and what the whole costs."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("op", overflow="ellipsis", no_wrap=True)
    table.add_column("precision", no_wrap=True)
    for name, precision in found.precisions.items():
        table.add_row(Text(name), str(precision))
    yield table
    cost = f"costs {found.cost:.4g} of {found.budget:.4g} {_UNITS[found.unit]}"
    yield Text(f"{cost}; expected change of the loss {found.harm:.3g}")
