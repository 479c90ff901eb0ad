"""The heat map of sensitivities: ops by operands and widths, and the widths that were chosen."""

from __future__ import annotations

import altair as alt

from fractrain_fx.report.charts.spec import Spec, plain

__all__ = ["harm_map"]

_ROW = 15  # height of an op, in pixels


def harm_map(table: str, ops: int, title: str, *, percent: bool) -> Spec:
    """What rounding does to the loss, for each op and width; rings mark the widths that were chosen.

    Args:
        table: the rows.
        ops: their number.
        title: of the colours.
        percent: whether values are shares.
    """
    base = alt.Chart(alt.NamedData(name=table)).encode(
        x=alt.X(
            "column:N", title=None, sort=None, axis=alt.Axis(orient="top", labelAngle=0, domain=False, ticks=False)
        ),
        y=alt.Y("op:N", title=None, sort=None, axis=alt.Axis(domain=False, ticks=False)),
    )
    tooltip = [
        alt.Tooltip("op:N"),
        alt.Tooltip("operand:N"),
        alt.Tooltip("bits:Q", format="d"),
        alt.Tooltip("value:Q", title=title, format=".3~%" if percent else ".3~g"),
        alt.Tooltip("chosen:N"),
    ]
    # Values at or below 0 have no logarithm, and harm nothing.
    cells = base.mark_rect().encode(
        color=alt.Color(
            "shade:Q",
            scale=alt.Scale(range="heatmap", interpolate="rgb"),
            legend=alt.Legend(title=f"{title}, powers of ten", titleLimit=0),
        ),
        tooltip=tooltip,
    )
    rings = (
        base.transform_filter("datum.chosen !== ''")
        .mark_point(shape="circle", size=50, strokeWidth=2, opacity=1)
        .encode(fill=alt.value("white"), stroke=alt.value("black"), tooltip=tooltip)
    )
    return plain(cells + rings, height=max(90, _ROW * ops))
