"""Machines, and steps planned on one, as tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from fractrain_fx.hardware.plan import PlannedStep

__all__ = ["machines_table", "source_lines", "step_lines", "steps_table"]

# One column for types that have the same peak on every board.
_TYPES = {
    "float32": ("float32",),
    "tf32": ("tf32",),
    "16 bits": ("bfloat16",),
    "fp8": ("fp8",),
    "int8": ("int8",),
    "4 bits": ("int4", "mxfp4"),
}


def machines_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each machine; peaks in 10^12 operations a second."""
    table = _table("machines: dense peaks in 10^12 operations a second", ("name", "machine"))
    for heading in (*_TYPES, "GB/s", "W"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        peak = row.get("peak", {})
        cells = [next((f"{peak[kind] / 1e12:g}" for kind in kinds if kind in peak), "-") for kinds in _TYPES.values()]
        memory = f"{row['bandwidth'] / 1e9:,.0f}" if peak else "-"
        table.add_row(row["name"], row["title"], *cells, memory, f"{row['watts']:g}" if peak else "-")
    return table


def source_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Where each machine's figures come from."""
    for row in rows:
        if "sources" in row:
            told = "; ".join(f"{source['title']} ({source['figures']})" for source in row["sources"])
            yield f"{row['name']}: {told}"
    yield "bitfusion: docs/bitfusion.md; zc706: docs/machines.md"


def steps_table(steps: Sequence[PlannedStep]) -> Table:
    """A row for each precision of a plan on a machine."""
    first = steps[0]
    table = _table(f"a training step of {first.batch} samples on {first.machine}, computed", ("precision",))
    for heading in ("ms", "J", "of float32"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("bound by", "slowest"):
        table.add_column(heading)
    for step in steps:
        table.add_row(*_cells(step, first))
    return table


def step_lines(steps: Sequence[PlannedStep]) -> Iterator[str]:
    """The rows of ``steps_table`` as sentences, and what they leave out."""
    for step in steps:
        name, ms, joules, ratio, bounds, _ = _cells(step, steps[0])
        yield f"{step.machine}, {step.batch} samples, {name}: {ms} ms, {joules} J, {ratio} of float32; {bounds}"


def _cells(step: PlannedStep, first: PlannedStep) -> tuple[str, ...]:
    bounds = [each for each in sorted(step.bounds.items(), key=lambda each: -each[1]) if each[1] >= 0.005]
    return (
        step.precision + ("" if step.native else " *"),
        f"{1000 * step.seconds:.4g}",
        "-" if step.joules is None else f"{step.joules:.3g}",
        f"{step.seconds / first.seconds:.2f}" if first.seconds else "-",
        ", ".join(f"{100 * share:.0f} % {bound}" for bound, share in bounds),
        ", ".join(f"{name} {100 * share:.0f} %" for name, share, _ in step.slowest),
    )


def _table(title: str, columns: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, no_wrap=column != "machine")
    return table
