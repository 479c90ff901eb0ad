"""An allocation as a table of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from fractrain_fx.numerics.allocation.allocation import Allocation

__all__ = ["allocation_table"]

_UNITS = {"cp": "% of training at 32 bits", "joules": "joules a step", "seconds": "seconds a step"}


def allocation_table(stages: Sequence[Allocation]) -> Iterator[RenderableType]:
    """A row for each op with its precision in each stage, and what each stage costs."""
    several = len(stages) > 1
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("op", overflow="ellipsis", no_wrap=True)
    for number in range(1, len(stages) + 1):
        table.add_column(f"stage {number}" if several else "precision", no_wrap=True)
    for name in stages[0].precisions:
        precisions = [stage.precisions[name] for stage in stages]
        table.add_row(Text(name), *(f"{each.fw}/{each.bw}" if several else str(each) for each in precisions))
    yield table
    for number, found in enumerate(stages, 1):
        cost = f"costs {found.cost:.4g} of {found.budget:.4g} {_UNITS[found.unit]}"
        words = f"{cost}; expected change of the loss {found.harm:.3g}"
        yield Text(f"stage {number} {words}" if several else words)
