"""The panel of sensitivities: what rounding each operand of each op does to the loss, and the widths chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import altair as alt

from fractrain_fx.config import Pin
from fractrain_fx.numerics.allocation.allocation import FILE as ALLOCATION
from fractrain_fx.numerics.sensitivity import Sensitivities
from fractrain_fx.numerics.sensitivity.result import FILE
from fractrain_fx.report import frames
from fractrain_fx.report.runs import Run
from fractrain_fx.report.sheet import Column, Figure, Panel, Rendering
from fractrain_fx.report.spec import Spec, map_height, names, plain
from fractrain_fx.training.settings import RunSettings

__all__ = ["sensitivity"]

_OPERANDS = {"x": "activations", "w": "weights", "g": "gradients"}
_DECADES = 6.0  # below the largest value, which the colours tell apart


def sensitivity(runs: Sequence[Run], tables: dict[str, list[frames.Row]], slugs: Mapping[str, str]) -> Panel | None:
    """The panel; adds the tables of its figures. ``None`` if no run was measured."""
    figures: list[Figure] = []
    for run in runs:
        path = run.path / FILE
        if not (run.path.is_dir() and path.is_file()):
            continue
        sensitivities = Sensitivities.from_json(path)
        pins = _chosen(run.path / ALLOCATION)
        slug, ops = slugs[run.name], len(sensitivities.measured)
        for kind, title in (("loss", "change of the loss"), ("noise", "harm beside the batch's noise")):
            table = f"sensitivity-{kind}-{slug}"
            tables[table] = _rows(sensitivities, pins, noise=kind == "noise")
            figures.append(_map(run, table, ops, title, noise=kind == "noise"))
    if not figures:
        return None
    return Panel(
        "sensitivity",
        "Sensitivity",
        "What rounding one operand of one op to a width does while all else stays float (fractrain sensitivity RUN). "
        "Activations and weights: the expected change of the loss. Gradients: how much their rounding's noise raises "
        "the loss in a step, as a share of what the batch's own noise does. Rings mark the widths that were chosen "
        "under a budget.",
        tuple(figures),
    )


def _map(run: Run, table: str, ops: int, title: str, *, noise: bool) -> Figure:
    what = "gradients" if noise else "activations and weights"
    return Figure(
        key=table,
        summary=f"A heat map of {ops} ops by width: {title} for {what}.",
        columns=(Column("value", title, "g3"),),
        variants={"": Rendering(_chart(table, ops, title, percent=noise), (table,), f"{run.name}: {what}, {title}")},
        pivot=("op", "column", "value"),
        width="half",
    )


def _rows(sensitivities: Sensitivities, pins: Sequence[Pin], *, noise: bool) -> list[frames.Row]:
    """A row for each op, operand and width, with the logarithm of its value."""
    values = [(row, (row.noise if noise else row.change) or 0.0) for row in sensitivities.rows]
    shown = [(row, value) for row, value in values if (row.operand == "g") == noise]
    top = max((value for _, value in shown), default=0.0)
    least = math.log10(top) - _DECADES if top > 0 else 0.0
    return [
        {
            "op": row.op,
            "operand": _OPERANDS[row.operand],
            "bits": row.bits,
            "column": f"{row.operand} {row.bits}",
            "value": value,
            "shade": max(least, math.log10(value)) if value > 0 else least,
            "chosen": _words(_last_for(row.op, pins), row.bits, noise=noise),
        }
        for row, value in sorted(shown, key=lambda pair: pair[0].operand, reverse=True)  # x before w
    ]


def _chosen(path: Path) -> Sequence[Pin]:
    """The rules in the settings that an allocation wrote."""
    return RunSettings.from_yaml(path).frac.pins if path.is_file() else ()


def _last_for(op: str, pins: Sequence[Pin]) -> Pin | None:
    """The last rule for an op, which wins."""
    return next((pin for pin in reversed(pins) if fnmatchcase(op, pin.pattern)), None)


def _words(pin: Pin | None, bits: int, *, noise: bool) -> str:
    """Whether a width was chosen: ``chosen``, or the stages that have it; empty if none."""
    widths = [] if pin is None else [stage.bw if noise else stage.fw for stage in pin.stages]
    if bits not in widths:
        return ""
    stages = [str(number) for number, width in enumerate(widths, 1) if width == bits]
    return "chosen" if len(widths) == 1 else f"chosen in stage {', '.join(stages)}"


def _chart(table: str, ops: int, title: str, *, percent: bool) -> Spec:
    """The change of the loss by rounding, for each op and width; rings mark the widths that were chosen.

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
        y=names("op"),
    )
    tooltip = [
        alt.Tooltip("op:N"),
        alt.Tooltip("operand:N"),
        alt.Tooltip("bits:Q", format="d"),
        alt.Tooltip("value:Q", title=title, format=".3~%" if percent else ".3~g"),
        alt.Tooltip("chosen:N"),
    ]
    # A value at or below 0 has no logarithm, and does no harm.
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
    return plain(cells + rings, height=map_height(ops))
