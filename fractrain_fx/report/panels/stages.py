"""The panel of stages: cp against its target, turning points, and the cost and time of stages side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fractrain_fx.report import charts, frames
from fractrain_fx.report.runs import Run
from fractrain_fx.report.sheet import Column, Figure, Panel, Variant, width_of

__all__ = ["stages"]


def stages(runs: Sequence[Run], rows: Sequence[frames.Row], slugs: Mapping[str, str]) -> Panel:
    """The panel; ``rows`` are the rows of the stages' table."""
    columns = (
        Column("epoch", "epoch", "d"),
        Column("level", "stage"),
        Column("cp", "cp, %", "g4"),
        Column("target", "target, %", "g4"),
        Column("cp_total", "cp_total, %", "g4"),
        Column("loss", "training loss", "g6"),
    )
    highest = max(100 * record.row.cp_total for run in runs for record in run.records)
    top = max([highest, *(stage.target or 0.0 for run in runs for stage in run.stages)]) * 1.2
    figures = [
        Figure(
            key=f"cost-{slugs[run.name]}",
            summary=_stage_story(run),
            columns=columns,
            variants={"": Variant(_cost_chart(run, top), ("epochs", "segments"), f"{run.name}: cost of each epoch")},
            where={"run": [run.name]},
            width=width_of(len(runs)),
        )
        for run in runs
    ]
    shown = [
        ("cp_total", "Simulated cost by stage", "cp_total, % of full precision"),
        ("bitfusion_step", "BitFusion estimate by stage", "ms a step"),
    ]
    timed = any(row["measured_step"] is not None for row in rows)
    measured = ("measured_step", "ms a step") if timed else ("epoch_seconds", "s an epoch, evaluation included")
    shown.append((measured[0], "Measured time by stage", measured[1]))
    names = [run.name for run in runs]
    stage_columns = (
        Column("run", "run"),
        Column("stage", "stage"),
        Column("epochs", "epochs", "d"),
        Column("cp", "cp, %", "g4"),
        Column("cp_total", "cp_total, %", "g4"),
        Column("bitfusion_step", "BitFusion, ms a step", "g4"),
        Column("joules_step", "BitFusion, J a step", "g4"),
        Column("measured_step", "measured, ms a step", "g4"),
        Column("epoch_seconds", "measured, s an epoch with evaluation", "g4"),
    )
    for field, heading, title in shown:
        if any(row[field] is not None for row in rows):
            told = ", ".join(f"{row['run']} {row['stage']}: {row[field]:.4g}" for row in rows if row[field] is not None)
            bars = sum(row[field] is not None for row in rows)
            variant = Variant(charts.stages(field, title, names, bars), ("stages",), heading)
            key = f"stages-{field.replace('_', '-')}"
            figures.append(Figure(key, f"Bars: {title}. {told}.", stage_columns, {"": variant}, width="third"))
    notes = []
    uncounted = {run.name: run.records[-1].row.uncounted for run in runs if run.records[-1].row.uncounted}
    if uncounted:
        counts = ", ".join(f"{count} in {name}" for name, count in uncounted.items())
        notes.append(f"No formula counts some contractions, which are in no share of cost: {counts}.")
    if not timed:
        notes.append("The time of steps was not kept by these runs: epochs are shown, with their evaluation.")
    known = [(run.name, run.settings.frac) for run in runs if run.settings is not None]
    lighter = [name for name, frac in known if frac.dispatches or frac.may_use_codes]
    if left_out := [name for name, frac in known if frac.dispatches]:
        notes.append(f"In {', '.join(left_out)} samples that skip a block are left out of it.")
    if coded := [name for name, frac in known if frac.may_use_codes]:
        notes.append(
            f"In {', '.join(coded)} products of 8 bits may run on integers. What else is rounded computes in float."
        )
    swapped = [name for name, frac in known if frac.run.torchao]
    if swapped:
        notes.append(
            f"In {', '.join(swapped)} torchao computes linear layers at the bits that it has kernels for. What else is "
            "rounded computes in float."
        )
    if len(lighter) + len(swapped) < len(runs):
        notes.append(
            "Low precision is simulated in float here: its measured time says what training in fractrain_fx takes, "
            "not what it would take on hardware with these bits."
        )
    return Panel(
        "stages",
        "Stages",
        "What each epoch cost beside its target, and when the stage changed. cp is over the contractions that the "
        "method steers, cp_total over all of them.",
        tuple(figures),
        notes=tuple(notes),
    )


def _cost_chart(run: Run, top: float) -> dict[str, Any]:
    steered = any(stage.target is not None for stage in run.stages)
    return charts.cost(run.name, top, stages=len(run.stages), steered=steered)


def _stage_story(run: Run) -> str:
    parts = [
        f"{stage.shown}, epochs {stage.first} to {stage.last}, cp at the end {100 * stage.records[-1].row.cp:.2f} %"
        for stage in run.stages
    ]
    turning = ", ".join(run.turning_texts) or "none"
    return (
        f"cp and cp_total of each epoch over the stages of {run.name}. {'; '.join(parts)}. Turning points: {turning}."
    )
