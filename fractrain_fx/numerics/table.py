"""Tables of numerics that fit a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from fractrain_fx.numerics.comparison import Comparison, OpDifference
    from fractrain_fx.numerics.records import WatchedStep
    from fractrain_fx.numerics.statistics import Statistics

__all__ = ["Printed", "comparison_table", "shortened", "step_table", "table"]

_ROWS = 20
_REST = 56  # characters of the columns beside the name


class Printed:
    """What rich renders, as text of 80 columns."""

    def __str__(self) -> str:
        console = Console(width=80, no_color=True)
        with console.capture() as captured:
            console.print(self)
        return captured.get()


def table(left: Sequence[str], right: Sequence[str] = (), title: str | None = None) -> Table:
    """A table without rows: the headings of columns of text, and of columns of numbers."""
    grid = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in (*left, *right):
        grid.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    return grid


def comparison_table(found: Comparison, width: int) -> Iterator[Any]:
    """The parts of a comparison, from top to bottom."""
    yield Text(
        f"loss {found.loss:.4g}, in float {found.float_loss:.4g}; output differs by {_per_cent(found.output)}, "
        f"weight gradients by {_per_cent(found.gradient)}"
    )
    if found.first is None:
        yield Text("no operand is beyond a bound")
    else:
        more = len(found.findings) - 1
        yield Text(f"first beyond a bound: {found.first}" + (f" ({more} more follow)" if more else ""))
    differs = ("output\ndiffers", "its\ngradient", "weight's\ngradient")
    grid = table(["op"], [*differs, "least\nSQNR", "share of\noutput", "share of\ngradient"])
    shown = found.by_share[:_ROWS]
    for op in shown:
        grid.add_row(
            shortened(op.name, max(width - _REST, 12)),
            *map(_per_cent, (op.output, op.gradient, op.weight)),
            _worst(found, op),
            f"{op.output_share:.0%}",
            f"{op.gradient_share:.0%}",
        )
    yield grid
    how = "each op was switched to float" if found.how == "switched" else "estimated from each op's own error"
    left = len(found.ops) - len(shown)
    yield Text(f"Shares: {how}." + (f" {left} more ops have smaller ones." if left > 0 else ""), style="dim")


def step_table(step: WatchedStep, width: int) -> Iterator[Any]:
    """The operands of a watched step, those first that rounding leaves least of."""
    formats = list(dict.fromkeys(record.as_if for record in step.operands if record.as_if))
    by_operand: dict[tuple[str, str, tuple[str, ...]], dict[str, Statistics]] = {}
    for record in step.operands:
        by_operand.setdefault((record.op, record.operand, record.products), {})[record.as_if] = record.statistics
    rounded = {key: stats for key, stats in by_operand.items() if "" in stats and stats[""].sqnr is not None}
    order = sorted(rounded, key=lambda key: rounded[key][""].sqnr or 0.0)
    yield Text(f"step {step.step}, {step.ran}; signal-to-noise ratios in dB, the least first")
    grid = table(["op", "operand"], ["bits", "now", *formats, "clipped", "to 0"])
    for op, operand, products in order[:_ROWS]:
        stats = rounded[op, operand, products]
        now = stats[""]
        grid.add_row(
            shortened(op, max(width - _REST - sum(len(name) + 1 for name in formats), 12)),
            f"{operand} of {'+'.join(products)}",
            f"{now.bits:g}",
            *(_decibels(stats.get(name)) for name in ("", *formats)),
            _per_cent(now.clipped),
            _per_cent(now.underflowed),
        )
    yield grid
    left = len(rounded) - _ROWS
    if left > 0:
        yield Text(f"{left} more operands lose less.", style="dim")


def _decibels(stats: Statistics | None) -> str:
    return "-" if stats is None or stats.sqnr is None else f"{stats.sqnr:.0f}"


def shortened(name: str, room: int) -> str:
    """A name with its end, which tells ops apart."""
    return name if len(name) <= room else "…" + name[1 - room :]


def _worst(comparison: Comparison, op: OpDifference) -> str:
    """The operand that rounding leaves least of."""
    rows = [record for record in comparison.operands if record.op == op.name and record.statistics.sqnr is not None]
    if not rows:
        return "-"
    worst = min(rows, key=lambda record: record.statistics.sqnr or 0.0)
    return f"{worst.operand} {worst.statistics.sqnr:.0f} dB"


def _per_cent(value: float | None) -> str:
    if value is None or value != value:
        return "-"
    return f"{100 * value:.2g}%" if value < 10 else f"{value:.2g}x"
