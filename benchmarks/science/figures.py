"""The figures of docs/measured/results.md: what whole trainings reach for their cost, and how the longest get there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from benchmarks.science.records import Group
from fractrain_fx.report.theme import vega_config

__all__ = ["write_figures"]

_WIDTH, _HEIGHT = 620, 340


def write_figures(folder: Path, task: str, groups: Sequence[Group], prefix: str = "science") -> list[tuple[Path, str]]:
    """Write the figures of a task as SVG, in files whose names begin alike; returns each with a description."""
    metric = groups[0].metric
    longest = max(group.epochs for group in groups)
    written = []
    for name, chart, words in (
        ("cost", _costs(groups, metric), f"test {metric} at the end of a training against its whole cost"),
        ("epoch", _epochs([group for group in groups if group.epochs == longest], metric), f"test {metric} by epoch"),
    ):
        path = folder / f"{prefix}-{task}-{name}.svg"
        path.write_text(vl_convert.vegalite_to_svg(chart.to_dict(), config=vega_config("light")), encoding="utf-8")
        written.append((path, f"{task}: {words}"))
    return written


def _costs(groups: Sequence[Group], metric: str) -> Any:
    """A point for each whole training, with the range over seeds; a line joins trainings that differ in length."""
    points = []
    for group in groups:
        macs, values = group.values("total_macs"), group.values("value")
        mean = sum(values) / len(values)
        ends = {"macs": sum(macs) / len(macs), "value": mean, "low": min(values), "high": max(values)}
        points.append({"run": f"{group.method}, {group.setting}", "epochs": group.epochs} | ends)
    base = _base(points, alt.X("macs:Q", title="whole cost, full-precision MACs", axis=alt.Axis(format="~e")), metric)
    bars = base.mark_rule().encode(y=alt.Y("low:Q"), y2=alt.Y2("high:Q"))
    words = base.mark_text(dy=-10, fontSize=10).encode(text=alt.Text("epochs:Q"))
    return base.mark_line(opacity=0.5) + bars + base.mark_point(filled=True, size=70) + words


def _epochs(groups: Sequence[Group], metric: str) -> Any:
    """The mean over seeds after each epoch."""
    points = []
    for group in groups:
        for epoch in zip(*(record["points"] for record in group.records), strict=True):
            value = sum(point["value"] for point in epoch) / len(epoch)
            points.append({"run": f"{group.method}, {group.setting}", "epoch": epoch[0]["epoch"], "value": value})
    return _base(points, alt.X("epoch:Q", title="epoch", axis=alt.Axis(format="d")), metric).mark_line()


def _base(points: list[dict[str, Any]], x: alt.X, metric: str) -> Any:
    return alt.Chart(alt.Data(values=points), width=_WIDTH, height=_HEIGHT).encode(
        x=x,
        y=alt.Y("value:Q", title=f"test {metric}", scale=alt.Scale(zero=False)),
        color=alt.Color("run:N", title=None, legend=alt.Legend(labelLimit=400, orient="bottom", columns=1)),
    )
