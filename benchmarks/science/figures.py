"""The figures of docs/results.md: accuracy against the training cost so far, and against the epoch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from benchmarks.science.records import Group
from fractrain_fx.report.theme import vega_config

__all__ = ["write_figures"]

_SIZE = {"width": 620, "height": 340}


def write_figures(folder: Path, task: str, groups: Sequence[Group]) -> list[tuple[Path, str]]:
    """Write the figures of a task as SVG; returns each with a description."""
    points = [point for group in groups for point in _points(group)]
    metric = groups[0].records[0]["metric"]
    written = []
    for axis, title in (("macs", "training cost so far, full-precision MACs"), ("epoch", "epoch")):
        path = folder / f"science-{task}-{axis}.svg"
        spec = _chart(points, axis, title, f"test {metric}").to_dict()
        path.write_text(vl_convert.vegalite_to_svg(spec, config=vega_config("light")), encoding="utf-8")
        written.append((path, f"{task}: test {metric} against {title}"))
    return written


def _points(group: Group) -> list[dict[str, Any]]:
    """The mean over seeds of each epoch; the last one is marked, because the schedule ends there."""
    name = f"{group.method}, {group.setting}, {group.epochs} epochs"
    found = []
    for each in zip(*(record["points"] for record in group.records), strict=True):
        value, macs = (sum(point[key] for point in each) / len(each) for key in ("value", "total_macs"))
        epoch = each[0]["epoch"]
        found.append({"run": name, "epoch": epoch, "macs": macs, "value": value, "last": epoch == group.epochs})
    return found


def _chart(points: list[dict[str, Any]], axis: str, title: str, measure: str) -> Any:
    base = alt.Chart(alt.Data(values=points), **_SIZE).encode(
        x=alt.X(f"{axis}:Q", title=title, axis=alt.Axis(format="~e" if axis == "macs" else "d")),
        y=alt.Y("value:Q", title=measure, scale=alt.Scale(zero=False)),
        color=alt.Color("run:N", title=None, legend=alt.Legend(labelLimit=400, orient="bottom", columns=1)),
    )
    return base.mark_line() + base.transform_filter("datum.last").mark_point(filled=True, size=70)
