"""The plots as Vega-Lite, each over a named table (``frames``), without data and with the theme's colours only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from fractrain_fx.report.frames import ALL_PATHS, PATHS
from fractrain_fx.report.theme import PATH_COLOURS

__all__ = [
    "AXES",
    "MEASURES",
    "allocation",
    "bits",
    "blocks",
    "cost",
    "information",
    "paths",
    "samples",
    "stages",
    "trajectory",
]

Spec = dict[str, Any]

# Possible x axes of a trajectory: field of the epochs' table, and title of the axis.
AXES = {
    "macs": "training cost so far, full-precision MACs",
    "joules": "energy so far on BitFusion, J",
    "bitfusion_seconds": "latency so far on BitFusion, s",
    "hours": "measured time so far, hours",
    "epoch": "epoch",
}
MEASURES = {"macs": "training MACs (32 bit)", "joules": "BitFusion energy, J", "seconds": "BitFusion latency, s"}
_MANY_STAGES = 6  # with more stages there is no room for their names
_BAR, _ROW = 18, 15  # heights of a bar, in pixels


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
    domain, legend = alt.Scale(domain=list(runs)), alt.Legend(values=list(shown))
    base = (
        alt.Chart(alt.NamedData(name="epochs"))
        .transform_filter(alt.FieldOneOfPredicate(field="run", oneOf=list(shown)))
        .transform_filter(f"isValid(datum['{measure}']) && isValid(datum['{axis}'])")
        .encode(
            x=alt.X(f"{axis}:Q", title=AXES[axis], axis=alt.Axis(format=_format(axis), tickCount=8), scale=_fit(axis)),
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
    return _plain(alt.layer(*layers, hover.add_params(near)).add_params(focus), height=340)


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
    return _plain(alt.layer(*layers), height=260)


def stages(field: str, title: str, runs: Sequence[str], rows: int) -> Spec:
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
            color=alt.Color("run:N", title=None, scale=alt.Scale(domain=list(runs))),
            tooltip=[
                alt.Tooltip("run:N"),
                alt.Tooltip("stage:N"),
                alt.Tooltip(f"{field}:Q", title=title, format=".4~g"),
            ],
        )
    )
    return _plain(chart, height=_BAR * rows)


def allocation(table: str, options: Sequence[str], epoch: int) -> Spec:
    """The shares of options that each block chose in one epoch (supplement, figure 2)."""
    chosen = alt.param(name="epoch", value=epoch)
    chart = (
        alt.Chart(alt.NamedData(name=table))
        .transform_filter("datum.epoch === epoch")
        .mark_bar()
        .encode(
            x=alt.X(
                "block:N",
                title=None,
                sort=None,
                axis=alt.Axis(labelAngle=-60, domain=False, ticks=False),
                scale=alt.Scale(paddingInner=0.12),
            ),
            y=alt.Y("share:Q", title="samples, %", scale=alt.Scale(domain=[0, 100]), stack="zero"),
            order=alt.Order("order:Q"),
            color=alt.Color("option:N", title=None, sort=None, scale=alt.Scale(domain=list(options), range="ordinal")),
            tooltip=[
                alt.Tooltip("block:N"),
                alt.Tooltip("option:N"),
                alt.Tooltip("share:Q", title="samples, %", format=".1f"),
            ],
        )
        .add_params(chosen)
    )
    return _plain(chart, height=260)


def bits(table: str, blocks: int, top: float) -> Spec:
    """The mean forward bits of each block over the epochs (skipping counts as 0); ``top`` is the end of the scale."""
    heat = alt.Scale(domain=[0, top], range="heatmap", interpolate="rgb")
    chart = (
        alt.Chart(alt.NamedData(name=table))
        .transform_calculate(start="datum.epoch - 0.5", end="datum.epoch + 0.5")
        .mark_rect()
        .encode(
            x=alt.X(
                "start:Q", title="epoch", scale=alt.Scale(nice=False, zero=False), axis=alt.Axis(format="d", grid=False)
            ),
            x2="end:Q",
            y=alt.Y("block:N", title=None, sort=None, axis=alt.Axis(domain=False, ticks=False)),
            color=alt.Color("bits:Q", title="mean forward bits", scale=heat),
            tooltip=[
                alt.Tooltip("block:N"),
                alt.Tooltip("epoch:Q"),
                alt.Tooltip("bits:Q", title="mean forward bits", format=".2f"),
            ],
        )
    )
    return _plain(chart, height=max(90, _ROW * blocks))


def information(runs: Sequence[str]) -> Spec:
    """Mutual information between sample and option over the epochs, one line for each run."""
    chart = (
        alt.Chart(alt.NamedData(name="information"))
        .mark_line(point=True)
        .encode(
            x=alt.X("epoch:Q", title="epoch", axis=alt.Axis(format="d", tickMinStep=1)),
            y=alt.Y("information:Q", title="bits a block", scale=alt.Scale(domainMin=0)),
            color=alt.Color("run:N", title=None, scale=alt.Scale(domain=list(runs))),
            tooltip=[
                alt.Tooltip("run:N"),
                alt.Tooltip("epoch:Q"),
                alt.Tooltip("information:Q", title="bits a block", format=".3f"),
                alt.Tooltip("configurations:Q"),
                alt.Tooltip("commonest:Q", title="most frequent configuration, % of samples", format=".1f"),
            ],
        )
    )
    return _plain(chart, height=220)


def samples(table: str) -> Spec:
    """Pictures of the samples at both ends, from the extreme inwards."""
    base = alt.Chart(alt.NamedData(name=table)).encode(
        x=alt.X("place:O", title=None, axis=None),
        y=alt.Y("end:N", title=None, sort=None, axis=alt.Axis(domain=False, ticks=False)),
        tooltip=[alt.Tooltip("end:N"), alt.Tooltip("cp:Q", title="cp, %", format=".3g")],
    )
    pictures = base.mark_image(width=48, height=48).encode(url="picture:N")
    costs = base.mark_text(dy=34, fontSize=10).encode(text=alt.Text("cp:Q", format=".3g"))
    return _plain(pictures + costs, height=170)


def paths(quantity: str, table: str, runs: int) -> Spec:
    """The cost of forward, error backward and weight gradient of each run."""
    return _plain(_by_path("run", quantity, table, alt.Undefined), height=34 * runs)


def blocks(quantity: str, table: str, top: float, rows: int) -> Spec:
    """The cost of each block of a run, split by path; ``top`` is the end of the axis."""
    return _plain(_by_path("block", quantity, table, alt.Scale(domainMax=top)), height=_BAR * rows)


def _by_path(rows: str, quantity: str, table: str, scale: Any) -> Any:
    names = list(PATHS.values())
    axis = alt.Axis(format=_format(quantity), tickCount=6)
    return (
        alt.Chart(alt.NamedData(name=table))
        .mark_bar()
        .encode(
            y=alt.Y(f"{rows}:N", title=None, sort=None, axis=alt.Axis(ticks=False, domain=False)),
            x=alt.X(f"{quantity}:Q", title=MEASURES[quantity], axis=axis, scale=scale),
            color=alt.Color(
                "path:N",
                title=None,
                sort=None,
                scale=alt.Scale(domain=[*names, ALL_PATHS], range=list(PATH_COLOURS)),
                legend=alt.Legend(values=names),
            ),
            order=alt.Order("path_order:Q"),
            tooltip=[
                alt.Tooltip(f"{rows}:N"),
                alt.Tooltip("path:N"),
                alt.Tooltip(f"{quantity}:Q", title=MEASURES[quantity], format=".4~s"),
            ],
        )
    )


def _format(field: str) -> str:
    return "d" if field == "epoch" else "~s" if field in ("macs", "joules") else "~g"


def _fit(axis: str) -> alt.Scale:
    return alt.Scale(zero=axis != "epoch", nice=axis != "epoch")


def _plain(chart: Any, height: int) -> Spec:
    """The specification as plain values; the page and ``plots`` set its width."""
    spec: Spec = chart.properties(height=height, width="container").to_dict(validate=False)
    for name in ("config", "$schema"):
        spec.pop(name, None)
    return spec
