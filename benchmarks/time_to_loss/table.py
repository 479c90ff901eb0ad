"""A run as tables in the terminal, and as the section of a Markdown page."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from benchmarks import records
from benchmarks.page import markdown_table
from benchmarks.records import machine_words, spread
from benchmarks.time_to_loss.curves import Curve, Run, targets

__all__ = ["markdown", "notes", "rich_tables"]

_METHODS = ("method", "step, ms", "to float", "training, s", "final loss", "skipped", "cp_total", "stages from step")


def markdown(run: Run) -> str:
    """The settings of the run, and both tables."""
    head, rows = _methods_table(run)
    parts = [_how(run), markdown_table(head, rows)]
    head, rows = _targets_table(run)
    parts.append(markdown_table(head, rows))
    return "\n\n".join([*parts, *notes(run)])


def rich_tables(run: Run) -> Iterator[Table]:
    """The table of methods, then the table of times to each loss."""
    yield records.rich_table(run.title, *_methods_table(run))
    yield records.rich_table("steps and seconds to a loss (to float's seconds)", *_targets_table(run))


def notes(run: Run) -> list[str]:
    """Notes on methods that were not trained, and on work before the first step."""
    lines = [
        f"{curve.method}: {len(curve.seconds)} steps were timed, each beside one of float; it was not trained to the "
        f"end ({curve.note})."
        for curve in run.curves
        if not curve.trained
    ]
    rewritten = [f"{curve.setup:.1f} s ({curve.method})" for curve in run.curves if curve.ledger]
    if rewritten:
        lines.append(f"Rewriting the model before the first step is not in the times: {', '.join(rewritten)}.")
    return lines


def _how(run: Run) -> str:
    settings = run.settings
    return (
        f"**{run.title}**: `{run.command}`; {machine_words(run.machine)}. All methods start from the same weights and "
        f"take the same {settings['steps']} batches of {settings['batch']} with the same optimizer (AdamW, rate up to "
        f"{settings['lr']:g}, cosine), a step of each in every round, in random order. FracTrain: "
        f"{settings['options']} options, beta {settings['beta']:g}, steered by the sign. A step is forward, loss, "
        f"backward and optimizer, and what the engine does at the end of an epoch of {settings['epoch']} steps. The "
        f"loss is that of {settings['blocks']} held-out blocks every {settings['every']} steps (not timed), mean of "
        "three such; a loss is reached at the last of the three. Step times and their ratios to float's step of the "
        "same round: median (quartiles). `skipped` is the share of samples that skipped a block, mean over blocks and "
        "steps; `cp_total` the simulated cost of the whole training, in per cent of full precision."
    )


def _methods_table(run: Run) -> tuple[list[str], list[list[str]]]:
    return list(_METHODS), [_cells(curve, run) for curve in run.curves]


def _cells(curve: Curve, run: Run) -> list[str]:
    cells = [curve.method, spread(curve.ms, 1), spread(curve.ratio(run.float_curve), 2)]
    if not curve.trained:
        return [*cells, *["not trained"] * 2, "", "", ""]
    skipped, cp_total = (_per_cent(value, digits) for value, digits in ((curve.skipped, 0), (curve.cp_total, 2)))
    stages = ", ".join(str(epoch * run.settings["epoch"]) for epoch in curve.turning_points)
    return [*cells, f"{sum(curve.seconds):.1f}", f"{curve.final:.3f}", skipped, cp_total, stages]


def _targets_table(run: Run) -> tuple[list[str], list[list[str]]]:
    trained = [curve for curve in run.curves if curve.trained]
    rows = []
    for target in targets(trained):
        name = f"{target.loss:.3f} (end of {target.final_of})" if target.final_of else f"{target.loss:.1f}"
        rows.append([name, *(_when(curve, run.float_curve, target.loss) for curve in trained)])
    return ["loss", *(curve.method for curve in trained)], rows


def _when(curve: Curve, base: Curve, loss: float) -> str:
    if (mine := curve.reached(loss)) is None:
        return "not reached"
    text = f"{mine.steps} steps, {mine.seconds:.1f} s"
    other = base.reached(loss)
    return f"{text} ({mine.seconds / other.seconds:.2f})" if other else text


def _per_cent(share: float | None, digits: int) -> str:
    return "" if share is None else f"{100 * share:.{digits}f} %"
