"""Plots of where the cost of a run went: by stage, by path and by block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from fractrain_fx.report.charts.spec import BAR, Spec, number_format, plain
from fractrain_fx.report.frames import ALL_PATHS, PATHS
from fractrain_fx.report.theme import PATH_COLOURS

__all__ = ["MEASURES", "blocks", "paths", "stages"]

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
