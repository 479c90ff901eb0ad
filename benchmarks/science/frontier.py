"""The opening of docs/measured/results.md: methods beside the best static precision of their cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import altair as alt
import vl_convert

from benchmarks.page import markdown_table
from benchmarks.science.cells import mean_and_range
from benchmarks.science.findings import quality
from benchmarks.science.named import METHODS
from benchmarks.science.records import Group, gap, static_of
from fractrain_fx.report.theme import vega_config

__all__ = ["BUDGETS", "frontier"]

BUDGETS = (30, 40, 55, 70)
"""Shares of the cost of static FW-8/BW-8, in per cent."""

_OUTER, _NEEDED = "outer layers too", "gradients by need"
# A run counts at a budget if it costs at most two points more: precisions and targets don't meet a share exactly.
_SLACK = 2.0
# A static precision is a rival of what costs up to this much more.
_REACH = 10.0
# So many runs of a setting are taken before a better single run: of many single runs the best is a lucky one.
_SEEDS = 2
_OWN_FORMATS = ("dorefa", "wageubn", "bf16")
# Words in a setting that make a curve of their own of a method, and its name. Outer layers are float by default.
_APART = {
    "samples": "ranges of samples",
    "rows": "ranges of rows",
    "needed": _NEEDED,
    "allocated": "allocated",
    "priced": "allocated",
    "ends": "first and last block high",
    "outer": _OUTER,
    "last": _OUTER,
}


class _Point(NamedTuple):
    """A group of runs and its cost, in per cent of static FW-8/BW-8's over as many epochs."""

    group: Group
    cost: float

    @property
    def curve(self) -> str:
        """The method, and in words what sets its runs apart."""
        parts = set(self.group.setting.replace("+", "-").split("-"))
        return ", ".join([self.group.method, *dict.fromkeys(words for name, words in _APART.items() if name in parts)])

    @property
    def static(self) -> bool:
        """Whether every op has the same fixed precision."""
        return self.curve == "static"

    @property
    def uniform(self) -> bool:
        """The same, with the outer layers rounded too or gradients counted by need."""
        method, *words = self.curve.split(", ")
        return method == "static" and {*words} <= {_OUTER, _NEEDED}

    @property
    def seeds(self) -> int:
        return len(self.group.records)


def frontier(groups: Sequence[Group], task: str, epochs: int, figure: Path) -> str:
    """The picture, a table of budgets and one of methods; empty without static precisions to compare.

    Args:
        groups: all groups of runs.
        task: the task of the runs that are compared.
        epochs: their length.
        figure: file of the picture, which is written.
    """
    points = _points(groups, task, epochs)
    if not any(point.static and point.cost < 100 for point in points):
        return ""
    figure.write_text(
        vl_convert.vegalite_to_svg(_chart(points).to_dict(), config=vega_config("light")), encoding="utf-8"
    )
    return "\n\n".join(filter(None, (_table(points), _rivals(points))))


def _points(groups: Sequence[Group], task: str, epochs: int) -> list[_Point]:
    mine = [group for group in groups if (group.task, group.epochs) == (task, epochs)]
    base = next(iter(static_of(mine)), None)
    if base is None:
        return []
    known = [group for group in mine if group.method in METHODS and group.method not in _OWN_FORMATS]
    return [_Point(group, 100 * group.mean("total_macs") / base.mean("total_macs")) for group in known]


def _best(points: Sequence[_Point], cost: float) -> _Point | None:
    """The best that costs no more."""
    affordable = [point for point in points if point.cost <= cost + _SLACK]
    return max(affordable, key=lambda point: quality(point.group), default=None)


def _table(points: Sequence[_Point]) -> str:
    rows = []
    for curve in _curves(points):
        mine = _of(points, curve)
        known = [point for point in mine if point.seeds >= _SEEDS]
        within = [_best(known, budget) or _best(mine, budget) for budget in BUDGETS]
        if any(within):
            rows.append((curve, *(mean_and_range(best.group.values("value")) if best else "" for best in within)))
    return markdown_table(("method", *(f"{budget} %" for budget in BUDGETS)), rows)


def _curves(points: Sequence[_Point]) -> list[str]:
    """All curves, in the order of the methods; the method alone comes first."""
    return sorted({point.curve for point in points}, key=lambda curve: ([*METHODS].index(curve.split(",")[0]), curve))


def _of(points: Sequence[_Point], curve: str) -> list[_Point]:
    return [point for point in points if point.curve == curve]


def _rivals(points: Sequence[_Point]) -> str:
    """Each curve where it is furthest from the best static precision of its cost, of those with the most seeds.

    Static precisions that round the outer layers, or count gradients by need, are rivals of all but themselves.
    """
    rows = []
    unit = "nats" if points[0].group.metric == "perplexity" else "points"
    for curve in _curves(points):
        mine = [point for point in _of(points, curve) if not point.static and point.cost < 100]
        static = [point for point in points if point.static or (point.uniform and point.curve != curve)]
        pairs = [(point, rival) for point in mine if (rival := _rival(point, static))]
        if not pairs:
            continue
        point, rival = max(pairs, key=lambda pair: (min(pair[0].seeds, pair[1].seeds), _distance(*pair)))
        seeds, far = min(point.seeds, rival.seeds), _distance(point, rival)
        side = "better" if far >= 0 else "worse"
        rows.append(
            (curve, f"{point.cost:.0f} %", f"{abs(far):.2f} {unit} {side}", f"`{rival.group.setting}`", str(seeds))
        )
    head = ("method", "cost", "beside the best static precision of its cost", "which", "seeds")
    return markdown_table(head, rows) if rows else ""


def _rival(point: _Point, static: Sequence[_Point]) -> _Point | None:
    """The best static precision that costs no more, if there is one of about that cost."""
    best = _best(static, point.cost)
    return best if best is not None and best.cost >= point.cost - _REACH else None


def _distance(point: _Point, rival: _Point) -> float:
    """How far a point is above another: higher is better."""
    far = gap(point.group, rival.group.mean("value"))
    return -far if point.group.metric == "perplexity" else far


def _chart(points: Sequence[_Point]) -> Any:
    values: list[dict[str, Any]] = []
    for point in points:
        if point.cost > 110:
            continue
        reached = point.group.values("value")
        ends = {"value": point.group.mean("value"), "low": min(reached), "high": max(reached)}
        values.append({"curve": point.curve, "setting": point.group.setting, "cost": point.cost, **ends})
    metric = points[0].group.metric
    base = alt.Chart(alt.Data(values=values), width=620, height=340).encode(
        x=alt.X("cost:Q", title="cost of the training, % of static FW-8/BW-8", scale=alt.Scale(zero=False)),
        y=alt.Y("value:Q", title=f"test {metric}", scale=alt.Scale(zero=False)),
        color=alt.Color("curve:N", title=None, legend=alt.Legend(orient="bottom")),
    )
    static = base.transform_filter("datum.curve == 'static'")
    spread = base.mark_rule(opacity=0.5).encode(y="low:Q", y2="high:Q")
    return static.mark_line(opacity=0.6) + spread + base.mark_point(filled=True, size=60)
