"""Machines, and steps planned on one, as tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fractrain_fx.summary.numbers import plain_number, time_unit
from fractrain_fx.summary.text import WIDE

if TYPE_CHECKING:
    from rich.table import Table

    from fractrain_fx.hardware.plan import PlannedStep

__all__ = ["machines_table", "slowest_lines", "source_lines", "step_lines", "steps_table"]

# One column for types that have the same peak on every board.
_TYPES = {
    "float32": ("float32",),
    "tf32": ("tf32",),
    "16 bits": ("bfloat16",),
    "fp8": ("fp8",),
    "int8": ("int8",),
    "4 bits": ("int4", "mxfp4"),
}

_PAGES = {"bitfusion": "docs/background/bitfusion.md", "zc706": "docs/reference/machines.md"}


def machines_table(rows: Sequence[Mapping[str, Any]], width: int = WIDE) -> Table:
    """A row for each machine; peaks in 10^12 operations a second. A narrow table has no titles of machines."""
    titled = width >= WIDE
    table = _table("machines: dense peaks in 10^12 operations a second", ("name", "machine") if titled else ("name",))
    for heading in (*_TYPES, "GB/s", "W"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        peak = row.get("peak", {})
        cells = [next((f"{peak[kind] / 1e12:g}" for kind in kinds if kind in peak), "-") for kinds in _TYPES.values()]
        memory = f"{row['bandwidth'] / 1e9:,.0f}" if peak else "-"
        title = (row["title"],) if titled else ()
        table.add_row(row["name"], *title, *cells, memory, f"{row['watts']:g}" if peak else "-")
    return table


def source_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What each machine is, and where its figures come from."""
    for row in rows:
        sources = "; ".join(f"{source['title']} ({source['figures']})" for source in row.get("sources", ()))
        yield f"{row['name']}: {row['title']}. {sources or _PAGES.get(row['name'], '')}".rstrip(". ")


def steps_table(steps: Sequence[PlannedStep], width: int = WIDE) -> Table:
    """A row for each precision of a plan on a machine; a narrow table leaves out ``slowest``."""
    first = steps[0]
    unit, cells = _cells(steps)
    table = _table(f"a training step of {first.batch} samples on {first.machine}, computed", ("precision",))
    for heading in (unit, "J", "of float32"):
        table.add_column(heading, justify="right", no_wrap=True)
    wide = width >= WIDE
    for heading in ("bound by", *(("slowest",) if wide else ())):
        table.add_column(heading)
    for row in cells:
        table.add_row(*(row if wide else row[:-1]))
    return table


def slowest_lines(steps: Sequence[PlannedStep]) -> Iterator[str]:
    """The column that a narrow ``steps_table`` leaves out: a line for each set of slowest ops."""
    named: dict[str, list[str]] = {}
    for step in steps:
        if step.seconds is not None:
            named.setdefault(_slowest(step), []).append(step.precision)
    for ops, precisions in named.items():
        yield f"slowest at {', '.join(precisions)}: {ops}"


def step_lines(steps: Sequence[PlannedStep]) -> Iterator[str]:
    """The rows of ``steps_table`` as sentences."""
    if not steps:
        return
    unit, cells = _cells(steps)
    for step, (name, time, joules, ratio, bounds, _) in zip(steps, cells, strict=True):
        yield f"{step.machine}, {step.batch} samples, {name}: {time} {unit}, {joules} J, {ratio} of float32; {bounds}"


def _cells(steps: Sequence[PlannedStep]) -> tuple[str, list[tuple[str, ...]]]:
    """The unit of all times, and the cells of each row."""
    unit, size = time_unit(step.seconds for step in steps if step.seconds is not None)
    return unit, [_row(step, size) for step in steps]


def _row(step: PlannedStep, size: float) -> tuple[str, ...]:
    if step.seconds is None:
        return (step.precision, "-", "-", "-", "no price", "")
    bounds = [pair for pair in sorted(step.bounds.items(), key=lambda pair: -pair[1]) if pair[1] >= 0.005]
    return (
        step.precision + ("" if step.native else " *"),
        plain_number(step.seconds / size),
        "-" if step.joules is None else plain_number(step.joules),
        f"{step.seconds / step.float32:.2f}" if step.float32 else "-",
        ", ".join(f"{100 * share:.0f} % {bound}" for bound, share in bounds),
        _slowest(step),
    )


def _slowest(step: PlannedStep) -> str:
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share, _ in step.slowest)


def _table(title: str, columns: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, no_wrap=column != "machine")
    return table
