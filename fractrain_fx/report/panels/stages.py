"""The panel of stages: cp against its target, turning points, and the cost and time of stages side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from fractrain_fx.report import frames
from fractrain_fx.report.runs import Run
from fractrain_fx.report.sheet import Column, Figure, Panel, Rendering, width_of
from fractrain_fx.report.spec import BAR, Spec, plain, run_colour, span

__all__ = ["stages"]

_MANY_STAGES = 6  # with more stages there is no room for their names


def stages(runs: Sequence[Run], tables: dict[str, list[frames.Row]], slugs: Mapping[str, str]) -> Panel:
    """The panel; adds the tables of its figures, apart from that of all epochs."""
    tables["segments"] = [row for run in runs for row in frames.segment_rows(run)]
    tables["stages"] = rows = frames.stage_rows(runs)
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
            variants={
                "": Rendering(_epochs_chart(run, top), ("epochs", "segments"), f"{run.name}: cost of each epoch")
            },
            where={"run": [run.name]},
            width=width_of(len(runs)),
        )
        for run in runs
    ]
    shown = [
        ("cp_total", "Simulated cost by stage", "cp_total, % of full precision"),
        ("bitfusion_step", "BitFusion estimate by stage", "ms a step"),
        ("measured_step", "Measured time by stage", "ms a step"),
    ]
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
            text = ", ".join(f"{row['run']} {row['stage']}: {row[field]:.4g}" for row in rows if row[field] is not None)
            bars = sum(row[field] is not None for row in rows)
            variant = Rendering(_stages_chart(field, title, names, bars), ("stages",), heading)
            key = f"stages-{field.replace('_', '-')}"
            figures.append(Figure(key, f"Bars: {title}. {text}.", stage_columns, {"": variant}, width="third"))
    notes = []
    uncounted = {run.name: run.records[-1].row.uncounted for run in runs if run.records[-1].row.uncounted}
    if uncounted:
        counts = ", ".join(f"{count} in {name}" for name, count in uncounted.items())
        notes.append(f"No formula counts some contractions, which are in no share of cost: {counts}.")
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


def _stage_story(run: Run) -> str:
    parts = [
        f"{stage.shown}, epochs {stage.first} to {stage.last}, cp at the end {100 * stage.records[-1].row.cp:.2f} %"
        for stage in run.stages
    ]
    turning = ", ".join(run.turning_texts) or "none"
    return (
        f"cp and cp_total of each epoch over the stages of {run.name}. {'; '.join(parts)}. Turning points: {turning}."
    )


def _epochs_chart(run: Run, top: float) -> Spec:
    """The cost of each epoch: cp against its target, cp_total, and stages as bands.

    Args:
        run: the run.
        top: end of the axis, in per cent.
    """
    steered = any(stage.target is not None for stage in run.stages)
    mine = f"datum.run === {run.name!r}"
    segments = alt.Chart(alt.NamedData(name="segments")).transform_filter(mine)
    segments = segments.transform_calculate(start="datum.first - 0.5", end="datum.last + 0.5")
    x = span("epoch", "d")
    bands = segments.mark_rect(stroke=None).encode(
        x=x, x2="end:Q", opacity=alt.condition("datum.stage_index % 2 === 1", alt.value(0.13), alt.value(0.04))
    )
    kinds = ["cp", "target cp", "cp_total"]
    legend = alt.Legend(values=[kind for kind in kinds if steered or kind != "target cp"])
    colour = alt.Color("measure:N", title=None, scale=alt.Scale(domain=kinds), legend=legend)
    targets = (
        segments.transform_filter("isValid(datum.target)")
        .mark_rule(strokeDash=[6, 4], strokeWidth=2)
        .encode(x=x, x2="end:Q", y=alt.Y("target:Q"), color=alt.Color(datum="target cp"))
    )
    y = alt.Y("share:Q", title="% of full-precision cost", scale=alt.Scale(domain=[0, top], nice=False))
    lines = (
        alt.Chart(alt.NamedData(name="epochs"))
        .transform_filter(mine)
        .transform_fold(["cp", "cp_total"], as_=["measure", "share"])
        .mark_line(strokeWidth=2, strokeJoin="round", point=alt.OverlayMarkDef(size=22, filled=True))
        .encode(
            x="epoch:Q",
            y=y,
            color=colour,
            tooltip=[
                alt.Tooltip("epoch:Q"),
                alt.Tooltip("level:N", title="stage"),
                alt.Tooltip("measure:N", title="share"),
                alt.Tooltip("share:Q", title="%", format=".4~g"),
            ],
        )
    )
    layers: list[Any] = [bands, lines, *([targets] if steered else [])]
    if len(run.stages) <= _MANY_STAGES:
        for odd in range(min(len(run.stages), 2)):  # on two lines, because a short stage is narrower than its name
            names = segments.transform_filter(f"datum.stage_index % 2 === {odd}")
            names = names.mark_text(align="left", baseline="top", dx=5, dy=4 + 14 * odd, fontSize=11)
            layers.append(names.encode(x=x, y=alt.value(0), text="level:N"))
    return plain(alt.layer(*layers), height=260)


def _stages_chart(field: str, title: str, runs: Sequence[str], rows: int) -> Spec:
    """One number of each stage of each run."""
    chart = (
        alt.Chart(alt.NamedData(name="stages"))
        .transform_filter(f"isValid(datum['{field}'])")
        .mark_bar(cornerRadiusEnd=2)
        .encode(
            y=alt.Y(
                "key:N",
                title=None,
                sort=None,
                axis=alt.Axis(ticks=False, domain=False, labelExpr="split(datum.label, '\\n')[1]"),
            ),
            x=alt.X(f"{field}:Q", title=title, axis=alt.Axis(tickCount=4)),
            color=run_colour(runs),
            tooltip=[
                alt.Tooltip("run:N"),
                alt.Tooltip("stage:N"),
                alt.Tooltip(f"{field}:Q", title=title, format=".4~g"),
            ],
        )
    )
    return plain(chart, height=BAR * rows)
