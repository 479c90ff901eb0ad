"""Comparison tables for a terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fractrain_fx.zoo.comparison import PaperComparison
from fractrain_fx.zoo.recipe import TABLES

__all__ = ["comparison_lines", "comparison_table", "markdown_table", "notes_of"]

_HEADINGS = (
    "run",
    "accuracy, perplexity",
    "MACs: paper",
    "computed",
    "part of run",
    "saving: paper / computed",
    "energy kJ: paper / computed",
    "ratio",
    "latency min: paper / computed",
    "ratio",
)
_NAMES = (
    *("test", "MACs of the paper", "computed", "part of run", "saving"),
    *("energy kJ", "ratio to baseline", "latency min", "ratio to baseline"),
)
"""What stands before the numbers where there are no columns; pairs are paper / computed."""
_NOTES = (
    "MACs computed: 3 M cp for each sample of the whole run, every layer at its stated bits as the paper counts; its "
    "printed MACs end at the best evaluation, after the part of the run in the next column. A part above 100 % says "
    "that stages were not equally long, as computing without a run assumes.",
    "Energy and latency are computed for the samples that the printed MACs pay for; the ratios are to the row's "
    "baseline, paper / computed. The paper's absolute values are higher and cannot be reached with the public "
    "simulator's configuration: compare ratios.",
)


def notes_of(rows: Sequence[PaperComparison]) -> list[str]:
    """Notes on how to read the table, and the notes of its rows."""
    notes = list(_NOTES)
    if any(row.runs for row in rows):
        notes.append("Measured: the best evaluation of a run, and the cost of the steered layers up to it.")
    return notes + list(dict.fromkeys(row.recipe.note for row in rows if row.recipe.note))


def comparison_table(table: str, rows: Sequence[PaperComparison]) -> Table:
    """The table for a terminal."""
    shown = Table(title=f"{_title(table)}: {TABLES[table]}", box=SIMPLE_HEAD, title_justify="left")
    for index, heading in enumerate(_HEADINGS):
        head = heading.replace(": ", "\n") if ": " in heading else heading.replace(", ", "\n")
        shown.add_column(head, justify="left" if index == 0 else "right", no_wrap=True)
    for title, group in groupby(rows, _group):
        shown.add_row(f"[bold]{escape(title)}[/bold]")
        for cells in chain.from_iterable(map(_cells, group)):
            shown.add_row(*map(escape, cells))
    return shown


def comparison_lines(table: str, rows: Sequence[PaperComparison]) -> Iterator[RenderableType]:
    """The table for a terminal that is too narrow for it: each run with its numbers below, in words."""
    yield Text(f"{_title(table)}: {TABLES[table]}", style="table.title")
    for title, group in groupby(rows, _group):
        yield Text(f"\n{title}", style="bold")
        for name, *numbers in chain.from_iterable(map(_cells, group)):
            words = "; ".join(f"{head} {cell}" for head, cell in zip(_NAMES, numbers, strict=True) if cell)
            yield Padding(Text(name.strip()), (0, 0, 0, 2))
            yield Padding(Text(words), (0, 0, 0, 6))


def markdown_table(rows: Sequence[PaperComparison]) -> str:
    """The table in Markdown."""
    lines = ["| " + " | ".join(_HEADINGS) + " |", "|---" + "|---:" * (len(_HEADINGS) - 1) + "|"]
    for title, group in groupby(rows, _group):
        lines.append(f"| **{title}** |" + " |" * (len(_HEADINGS) - 1))
        lines += ["| " + " | ".join(cells) + " |" for row in group for cells in _cells(row)]
    return "\n".join(lines) + "\n"


def _title(table: str) -> str:
    return f"Table {table}" if table.isdigit() else table.replace("-", " ").capitalize()


def _group(row: PaperComparison) -> str:
    return row.recipe.row.partition(", ")[0]


def _cells(row: PaperComparison) -> Iterator[tuple[str, ...]]:
    """The cells of a row, and of a row for each of its runs."""
    paper = row.recipe.paper
    yield (
        row.recipe.row.partition(", ")[2],
        _measure(row),
        "" if paper.macs is None else f"{paper.macs:.2e}",
        f"{row.expected.macs:.2e}",
        "" if row.part is None else f"{100 * row.part:.0f} %",
        _saving(row),
        _pair(paper.energy_kj, row.energy_kj, "{:.2f}"),
        _ratio(row, "energy_kj"),
        _pair(paper.latency_min, row.latency_min, "{:.1f}"),
        _ratio(row, "latency_min"),
    )
    for run in row.runs:
        whole = f"{100 * run.macs / run.end_macs:.0f} %" if run.end_macs else ""
        yield (
            f"  measured: {Path(run.folder).name}, epoch {run.best_epoch} of {run.epochs}",
            f"{run.measure:.2f}",
            "",
            f"{run.macs:.2e}",
            whole,
            "",
            f"{run.joules / 1e3:.2f}",
            "",
            f"{run.seconds / 60:.1f}",
            "",
        )


def _measure(row: PaperComparison) -> str:
    paper = row.recipe.paper
    if paper.measure is not None:
        return f"{paper.measure:.2f}"
    if paper.delta_range is not None:
        return f"{paper.delta_range[0]:+.2f} to {paper.delta_range[1]:+.2f}"
    return "" if paper.delta is None else f"{paper.delta:+.2f}"


def _saving(row: PaperComparison) -> str:
    if row.saving is None:
        return ""
    paper = row.recipe.paper
    if paper.cost_of_dfq is not None:
        return f"{paper.cost_of_dfq:g}x / {row.expected.macs / _base(row).expected.macs:.1f}x"
    if paper.saving_range is not None:
        printed = f"{paper.saving_range[0]:g} to {paper.saving_range[1]:g}"
    else:
        printed = "-" if row.printed_saving is None else f"{row.printed_saving:.1f}"
    return f"{printed} / {row.saving:.1f} %"


def _base(row: PaperComparison) -> PaperComparison:
    assert row.baseline is not None
    return row.baseline


def _pair(paper: float | None, ours: float | None, form: str) -> str:
    return "" if paper is None or ours is None else f"{form.format(paper)} / {form.format(ours)}"


def _ratio(row: PaperComparison, name: str) -> str:
    ratios = row.ratios(name)
    return "" if ratios is None else f"{ratios[0]:.3f} / {ratios[1]:.3f}"
