"""Plots of a run over its epochs: its measures against its cost, and its cost against the targets of its stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from fractrain_fx.report.charts.spec import Spec, number_format, plain

__all__ = ["AXES", "cost", "trajectory"]

# Possible x axes of a trajectory: field of the epochs' table, and title of the axis.
AXES = {
    "macs": "training cost so far, full-precision MACs",
    "joules": "energy so far on BitFusion, J",
    "bitfusion_seconds": "latency so far on BitFusion, s",
    "hours": "measured time so far, hours",
    "epoch": "epoch",
}
_MANY_STAGES = 6  # with more stages there is no room for their names


def trajectory(
    measure: str,
    title: str,
    axis: str,
    runs: Sequence[str],
    shown: Sequence[str],
    *,
    single: Sequence[str],
    turning: bool,
) -> Spec:
    """A measure of each run against its cost so far (paper, figure 6); marks are turning points.

    Args:
        measure: field of the epochs' table.
        title: title of its axis.
        axis: one of ``AXES``.
        runs: all runs of the report, so that each has its colour.
        shown: the runs that have this measure and this cost.
        single: those of them with the measure of one epoch, which a line would not show.
        turning: whether one of them has turning points.
    """
    focus = alt.selection_point(name="focus", fields=["run"], bind="legend")
    ticks = alt.Axis(format=number_format(axis), tickCount=8)
    domain, legend = alt.Scale(domain=list(runs)), alt.Legend(values=list(shown))
    base = (
        alt.Chart(alt.NamedData(name="epochs"))
        .transform_filter(alt.FieldOneOfPredicate(field="run", oneOf=list(shown)))
        .transform_filter(f"isValid(datum['{measure}']) && datum['{axis}'] > 0")
        .encode(
            x=alt.X(f"{axis}:Q", title=AXES[axis], axis=ticks, scale=_fit(axis)),
            y=alt.Y(f"{measure}:Q", title=title, scale=alt.Scale(zero=False)),
            color=alt.Color("run:N", title=None, scale=domain, legend=legend),
            opacity=alt.condition(focus, alt.value(1), alt.value(0.12)),
        )
    )
    told = [
        alt.Tooltip("run:N", title="run"),
        alt.Tooltip("epoch:Q", title="epoch"),
        alt.Tooltip("level:N", title="stage"),
        alt.Tooltip(f"{measure}:Q", title=title, format=".4~g"),
        alt.Tooltip("cp_total:Q", title="cp_total, %", format=".3~g"),
        alt.Tooltip("macs:Q", title="MACs so far", format=".4~s"),
    ]
    near = alt.selection_point(name="near", nearest=True, on="pointerover", clear="pointerout", empty=False)
    line = base.mark_line(strokeWidth=2, strokeJoin="round")
    alone = base.transform_filter(alt.FieldOneOfPredicate(field="run", oneOf=list(single))).mark_circle(size=60)
    points = base.transform_filter("datum.turning").mark_point(filled=True, size=90, opacity=1)
    points = points.encode(shape=alt.Shape("run:N", title=None, scale=domain, legend=legend))
    hover = base.mark_circle(size=110).encode(opacity=alt.condition(near, alt.value(1), alt.value(0)), tooltip=told)
    # Vega warns of a layer without a point, so these are drawn only where they have one
    layers = [line, *([alone] if single else []), *([points] if turning else [])]
    return plain(alt.layer(*layers, hover.add_params(near)).add_params(focus), height=340)


def cost(run: str, top: float, *, stages: int, steered: bool) -> Spec:
    """The cost of each epoch: cp against its target, cp_total, and stages as bands.

    Args:
        run: name of the run.
        top: end of the axis, in per cent.
        stages: number of stages in a row.
        steered: whether there are targets.
    """
    mine = f"datum.run === {run!r}"
    segments = alt.Chart(alt.NamedData(name="segments")).transform_filter(mine)
    segments = segments.transform_calculate(start="datum.first - 0.5", end="datum.last + 0.5")
    x = alt.X("start:Q", title="epoch", scale=alt.Scale(nice=False, zero=False), axis=alt.Axis(format="d", grid=False))
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
    if stages <= _MANY_STAGES:
        for odd in range(min(stages, 2)):  # on two lines, because a short stage is narrower than its name
            names = segments.transform_filter(f"datum.stage_index % 2 === {odd}")
            names = names.mark_text(align="left", baseline="top", dx=5, dy=4 + 14 * odd, fontSize=11)
            layers.append(names.encode(x=x, y=alt.value(0), text="level:N"))
    return plain(alt.layer(*layers), height=260)


def _fit(axis: str) -> alt.Scale:
    """Costs by their order of magnitude: float costs some twenty times what the runs beside it cost."""
    return alt.Scale(zero=False, nice=False) if axis == "epoch" else alt.Scale(type="log", nice=False)
