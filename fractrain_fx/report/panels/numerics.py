"""The panel of watched steps: a map of ops by time, and the curves of the op that is chosen."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import altair as alt

from fractrain_fx.numerics import WatchedStep, read_steps
from fractrain_fx.numerics.records import FILE
from fractrain_fx.report import frames
from fractrain_fx.report.runs import Run
from fractrain_fx.report.sheet import Column, Control, Figure, Panel, Rendering
from fractrain_fx.report.spec import Spec, map_height, names, plain, span

__all__ = ["numerics"]

_TIMES = 60  # columns of the map; steps between are drawn together, by their worst numbers

_CURVES = (
    Column("op", "op"),
    Column("operand", "operand"),
    Column("step", "step", "d"),
    Column("sqnr", "SQNR, dB", "f1"),
    Column("underflowed", "underflowed, %", "g3"),
    Column("clipped", "clipped, %", "g3"),
    Column("zero", "zero, %", "g3"),
    Column("largest", "largest value", "g3"),
)


def numerics(runs: Sequence[Run], tables: dict[str, list[frames.Row]], slugs: Mapping[str, str]) -> Panel | None:
    """The panel; adds the tables of its figures. ``None`` if no run was watched."""
    figures: list[Figure] = []
    ops: dict[str, str] = {}
    for run in runs:
        path = run.path / FILE
        steps = list(read_steps(path)) if run.path.is_dir() and path.is_file() else []
        curves = _curve_rows(steps)
        if not curves:
            continue
        slug, op_names = slugs[run.name], list(dict.fromkeys(row["op"] for row in curves))
        ops |= dict.fromkeys(op_names, "")
        tables[f"numerics-{slug}"], tables[f"curves-{slug}"] = _map_rows(curves), curves
        figures += [_map(run, f"numerics-{slug}", len(op_names), len(steps)), *_curves(run, f"curves-{slug}", op_names)]
    if not figures:
        return None
    control = Control("op", "Op", {op: op for op in ops})
    return Panel(
        "numerics",
        "Numerics",
        "What rounding leaves of each op's operands in the watched steps (fractrain train --watch): the "
        "signal-to-quantization-noise ratio. The map has the worst operand of each op. A click on it, or the list, "
        "chooses the op whose curves are drawn below.",
        tuple(figures),
        (control,),
    )


def _map(run: Run, table: str, ops: int, steps: int) -> Figure:
    return Figure(
        key=table,
        summary=f"A map of {ops} ops by {steps} watched steps: the least SQNR of the op's operands.",
        columns=(Column("sqnr", "least SQNR, dB", "f1"),),
        variants={"": Rendering(_map_chart(table, ops), (table,), f"{run.name}: least SQNR of each op")},
        pivot=("op", "end", "sqnr"),
        picks=("op", "op"),
    )


def _curves(run: Run, table: str, ops: Sequence[str]) -> list[Figure]:
    # Name of the figure, field of the table, title of the axis and its scale, and title of the figure.
    drawn = (
        ("ratios", "sqnr", "SQNR, dB", alt.Scale(zero=False), "SQNR of each operand"),
        ("ranges", "largest", "largest value", alt.Scale(type="log"), "largest values"),
    )
    return [
        Figure(
            key=f"{table}-{name}",
            summary=f"Curves over the watched steps, one for each operand of the chosen op: {title}.",
            columns=_CURVES,
            variants={
                op: Rendering(_curves_chart(table, op, field, axis, scale), (table,), f"{run.name}, {op}: {title}")
                for op in ops
            },
            width="half",
            plots=(),
        )
        for name, field, axis, scale, title in drawn
    ]


def _curve_rows(steps: Sequence[WatchedStep]) -> list[frames.Row]:
    """A row for each operand and stretch of steps, with the worst numbers of the stretch."""
    size = -(-len(steps) // _TIMES)
    curves: list[frames.Row] = []
    for at in range(0, len(steps), size or 1):
        stretch = steps[at : at + size]
        rows: dict[tuple[str, str], frames.Row] = {}
        for step in stretch:
            for record in step.operands:
                if record.as_if:
                    continue
                name = f"{record.operand} of {' and '.join(record.products)}"
                row = rows.setdefault((record.op, name), {"op": record.op, "operand": name, "step": stretch[-1].step})
                numbers = record.statistics
                row["sqnr"] = _worst(min, row.get("sqnr"), numbers.sqnr)
                for share in ("underflowed", "clipped", "zero"):
                    row[share] = _worst(max, row.get(share), round(100 * getattr(numbers, share), 4))
                row["largest"] = _worst(max, row.get("largest"), numbers.largest if numbers.finite else None) or None
        curves += rows.values()
    return curves


def _map_rows(curves: Sequence[frames.Row]) -> list[frames.Row]:
    """A row for each op and stretch: its operand with the least ratio."""
    starts = _starts(sorted({row["step"] for row in curves}))
    worst: dict[tuple[str, int], frames.Row] = {}
    for row in curves:
        before = worst.get((row["op"], row["step"]))
        if row["sqnr"] is not None and (before is None or row["sqnr"] < before["sqnr"]):
            worst[row["op"], row["step"]] = {
                "op": row["op"],
                "start": starts[row["step"]],
                "end": row["step"],
                "sqnr": row["sqnr"],
                "operand": row["operand"],
            }
    return list(worst.values())


def _starts(ends: Sequence[int]) -> dict[int, int]:
    """Where each stretch begins: where the one before ends."""
    first = 2 * ends[0] - ends[1] if len(ends) > 1 else ends[0] - 1
    return dict(zip(ends, (first, *ends), strict=False))


def _worst(worse: object, one: float | None, other: float | None) -> float | None:
    known = [x for x in (one, other) if x is not None]
    return worse(known) if known else None  # type: ignore[operator]


def _map_chart(table: str, ops: int) -> Spec:
    """The least signal-to-noise ratio of each op over the steps."""
    chart = (
        alt.Chart(alt.NamedData(name=table))
        .mark_rect(cursor="pointer")
        .encode(
            x=span("step", "~s"),
            x2="end:Q",
            y=names("op"),
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
    return plain(chart, height=map_height(ops))


def _curves_chart(table: str, op: str, field: str, title: str, scale: alt.Scale) -> Spec:
    """One number of each operand of one op over the steps."""
    chart = (
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
    return plain(chart, height=240)
