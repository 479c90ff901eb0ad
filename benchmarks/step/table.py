"""Runs as a table in the terminal, and as the section of a Markdown page."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from benchmarks import records
from benchmarks.page import markdown_table
from benchmarks.records import machine_words, spread
from benchmarks.step.results import Row, Run

__all__ = ["markdown", "not_run", "rich_table"]

_HOW = """
A step is forward, `engine.loss` and backward in training mode, without the optimizer. All methods of a table ran in one
process, in rounds of one step each in random order. Ratios are to the eager float32 step of the same round: median
(quartiles). Saved memory is what autograd keeps from forward to backward (`saved_tensors_hooks`; each storage once and
whole, parameters left out), as a ratio to float's. The samples of a batch are made to choose all options of DFQ equally
often. Peers quantize the same layers in the forward pass only.
"""


def markdown(runs: Iterable[Run]) -> str:
    """All runs, with the commands that made them."""
    parts = [_HOW.strip()]
    for run in runs:
        head = f"**{run.title}, batch {run.batch}, {run.device}**"
        parts.append(f"{head}: `{run.command}`, {run.rounds} rounds; {machine_words(run.machine)}.")
        parts.append(markdown_table(_head(run), (_cells(row, run) for row in run.rows if row.ms)))
        if left_out := not_run(run):
            parts.append(f"Not run: {'; '.join(left_out)}.")
    return "\n\n".join(parts)


def rich_table(run: Run) -> Table:
    """The rows of one run."""
    title = f"{run.title}, batch {run.batch}, {run.device}, {run.rounds} rounds"
    return records.rich_table(title, _head(run), (_cells(row, run) for row in run.rows if row.ms))


def not_run(run: Run) -> list[str]:
    """Each method that could not be measured, with the reason."""
    return [f"{row.method} ({row.note})" for row in run.rows if row.ms is None]


def _head(run: Run) -> list[str]:
    head = ["method", "step, ms", "ratio", "to float alike", "saved, MB", "saved, ratio"]
    if run.device == "cuda":
        head += ["peak, MB", "peak, ratio", "waits for the GPU"]
    return [*head, "first step, s"]


def _cells(row: Row, run: Run) -> list[str]:
    cells = [row.method, spread(row.ms, 1), spread(row.ratio, 2), _number(row.alike, 2)]
    cells += [_megabytes(row.saved), _number(row.saved_ratio, 2)]
    if run.device == "cuda":
        waiting = ", ".join(f"{count} {kind}" for kind, count in (row.waits or {}).items())
        cells += [_megabytes(row.peak), _number(row.peak_ratio, 2), waiting or "none"]
    return [*cells, _number(row.first, 1)]


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _megabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 1e6:.1f}"
