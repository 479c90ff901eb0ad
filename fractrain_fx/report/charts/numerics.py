"""Plots of watched steps: what rounding leaves of every op over time, and the curves of one op."""

from __future__ import annotations

import json

import altair as alt

from fractrain_fx.report.charts.spec import Spec, plain

__all__ = ["op_ranges", "op_ratios", "ratio_map"]

_ROW = 15  # height of an op, in pixels


def ratio_map(table: str, ops: int) -> Spec:
    """The least signal-to-noise ratio of each op over the steps."""
    chart = (
        alt.Chart(alt.NamedData(name=table))
        .mark_rect(cursor="pointer")
        .encode(
            x=alt.X(
                "start:Q", title="step", scale=alt.Scale(nice=False, zero=False), axis=alt.Axis(format="~s", grid=False)
            ),
            x2="end:Q",
            y=alt.Y("op:N", title=None, sort=None, axis=alt.Axis(domain=False, ticks=False)),
            color=alt.Color(
                "sqnr:Q", title="least SQNR, dB", scale=alt.Scale(range="heatmap", interpolate="rgb", clamp=True)
            ),
            tooltip=[
                alt.Tooltip("op:N"),
                alt.Tooltip("end:Q", title="step", format="d"),
                alt.Tooltip("sqnr:Q", title="least SQNR, dB", format=".1f"),
                alt.Tooltip("operand:N"),
            ],
        )
    )
    return plain(chart, height=max(90, _ROW * ops))


def op_ratios(table: str, op: str) -> Spec:
    """The signal-to-noise ratio of each operand of one op over the steps."""
    return plain(_curves(table, op, "sqnr", "SQNR, dB", alt.Scale(zero=False)), height=240)


def op_ranges(table: str, op: str) -> Spec:
    """The largest value of each operand of one op over the steps."""
    return plain(_curves(table, op, "largest", "largest value", alt.Scale(type="log")), height=240)


def _curves(table: str, op: str, field: str, title: str, scale: alt.Scale) -> alt.Chart:
    chart: alt.Chart = (
        alt.Chart(alt.NamedData(name=table))
        .transform_filter(f"datum.op === {json.dumps(op)} && isValid(datum.{field})")
        .mark_line(point=True)
        .encode(
            x=alt.X("step:Q", title="step", axis=alt.Axis(format="~s")),
            y=alt.Y(f"{field}:Q", title=title, scale=scale, axis=alt.Axis(format="~g")),
            color=alt.Color("operand:N", title=None, sort=None),
            tooltip=[
                alt.Tooltip("operand:N"),
                alt.Tooltip("step:Q", format="d"),
                alt.Tooltip("sqnr:Q", title="SQNR, dB", format=".1f"),
                alt.Tooltip("underflowed:Q", title="underflowed, %", format=".3g"),
                alt.Tooltip("clipped:Q", title="clipped, %", format=".3g"),
                alt.Tooltip("zero:Q", title="zero, %", format=".3g"),
                alt.Tooltip("largest:Q", title="largest value", format=".3g"),
            ],
        )
    )
    return chart
