"""Plots of where the cost of a run went, by stage, path and block, and of its time on other machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from fractrain_fx.report.charts.spec import BAR, Spec, number_format, plain
from fractrain_fx.report.frames import ALL_PATHS, PATHS
from fractrain_fx.report.theme import PATH_COLOURS

__all__ = ["MEASURES", "blocks", "machines", "paths", "stages"]

_TIMES = {"seconds": "training", "float32": "in float32", "bfloat16": "in bfloat16"}
MEASURES = {"macs": "training MACs (32 bit)", "joules": "BitFusion energy, J", "seconds": "BitFusion latency, s"}


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
    return plain(chart, height=BAR * rows)


def paths(quantity: str, table: str, runs: int) -> Spec:
    """The cost of forward, error backward and weight gradient of each run."""
    return plain(_by_path("run", quantity, table, alt.Undefined), height=34 * runs)


def blocks(quantity: str, table: str, top: float, rows: int) -> Spec:
    """The cost of each block of a run, split by path; ``top`` is the end of the axis."""
    return plain(_by_path("block", quantity, table, alt.Scale(domainMax=top)), height=BAR * rows)


def machines(runs: Sequence[str], top: float, rows: int) -> Spec:
    """The time of each run on each machine as a share of float32, with bfloat16 as a tick; ``top`` is the largest."""
    share = alt.Scale(domain=[0, 1.2 * top])  # right of the bars, the times stand as text
    bands = alt.Scale(paddingInner=0.2, paddingOuter=0.1)
    base = alt.Chart(alt.NamedData(name="machines")).encode(
        y=alt.Y("machine:N", title=None, sort=None, axis=alt.Axis(ticks=False, domain=False), scale=bands),
        yOffset=alt.YOffset("run:N", sort=list(runs)),
        tooltip=[
            alt.Tooltip("machine:N"),
            alt.Tooltip("run:N"),
            *(alt.Tooltip(f"{name}:Q", title=f"{title}, s", format=".4~g") for name, title in _TIMES.items()),
            alt.Tooltip("joules:Q", title="training, J", format=".4~g"),
            alt.Tooltip("wider:N", title="computed wider"),
        ],
    )
    bars = base.mark_bar(cornerRadiusEnd=2).encode(
        x=alt.X("of_float32:Q", title="% of the time in float32", scale=share, axis=alt.Axis(tickCount=6)),
        color=alt.Color("run:N", title=None, scale=alt.Scale(domain=list(runs))),
    )
    ticks = base.transform_filter("isValid(datum.bfloat16_of_float32)").mark_tick(thickness=4)
    labels = base.mark_text(align="right").encode(x=alt.value("width"), text="label:N")
    layers = alt.layer(bars, ticks.encode(x="bfloat16_of_float32:Q"), labels)
    return plain(layers, height=BAR * rows)


def _by_path(rows: str, quantity: str, table: str, scale: Any) -> Any:
    names = list(PATHS.values())
    axis = alt.Axis(format=number_format(quantity), tickCount=6)
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
