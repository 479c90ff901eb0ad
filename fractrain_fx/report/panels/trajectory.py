"""The panel of test measure and training loss against the cost so far (paper, figure 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import altair as alt

from fractrain_fx.report import frames
from fractrain_fx.report.runs import Run
from fractrain_fx.report.sheet import Column, Control, Figure, Panel, Rendering
from fractrain_fx.report.spec import Spec, number_format, plain, run_colour
from fractrain_fx.training.log.records import EpochRecord

__all__ = ["trajectories"]

# Possible x axes of a trajectory: field of the epochs' table, and title of the axis.
_AXES = {
    "macs": "training cost so far, full-precision MACs",
    "joules": "energy so far on BitFusion, J",
    "bitfusion_seconds": "latency so far on BitFusion, s",
    "hours": "measured time so far, hours",
    "epoch": "epoch",
}


def trajectories(runs: Sequence[Run], tables: dict[str, list[frames.Row]], slugs: Mapping[str, str]) -> Panel:
    """The panel; each figure can be drawn against several kinds of cost. Adds the table of all epochs."""
    tables["epochs"] = frames.epoch_rows(runs)
    names = [run.name for run in runs]
    metrics = list(dict.fromkeys(run.metric for run in runs))
    old = sorted({row["run"] for row in tables["epochs"] if row["joules"] is None}, key=names.index)
    known = len(old) < len(names)
    bitfusion = {"joules": "BitFusion energy", "bitfusion_seconds": "BitFusion latency"} if known else {}
    axes = {"macs": "full-precision MACs"} | bitfusion | {"hours": "measured time", "epoch": "epochs"}
    figures = []
    for measure, title, members in [
        *(("value", _unit(f"test {metric}", metric), [r for r in runs if r.metric == metric]) for metric in metrics),
        ("loss", "training loss", list(runs)),
    ]:
        member_names = [run.name for run in members]
        heading = title.partition(",")[0]
        variants = {}
        for axis in axes:
            shown = [run for run in members if run.name not in old or axis not in bitfusion]
            if not shown:
                continue
            spec = _chart(
                measure,
                title,
                axis,
                names,
                [run.name for run in shown],
                single=[run.name for run in shown if _epochs_with(measure, run) == 1],
                turning=any(run.turning_points for run in shown),
            )
            against = _AXES[axis].partition(",")[0]
            variants[axis] = Rendering(spec, ("epochs",), f"{heading[0].upper()}{heading[1:]} against {against}")
        columns = (
            Column("run", "run"),
            Column("epoch", "epoch", "d"),
            Column("level", "stage"),
            Column(measure, title, "g6"),
            Column("cp", "cp, %", "g4"),
            Column("cp_total", "cp_total, %", "g4"),
            Column("macs", "MACs so far", "e4"),
            Column("joules", "energy so far, J", "g4"),
            Column("bitfusion_seconds", "latency so far, s", "g4"),
            Column("hours", "measured, h", "g4"),
        )
        endings = " ".join(_ending(run, measure, title) for run in members)
        figures.append(
            Figure(
                key="trajectory-" + (members[0].metric if measure == "value" else "loss"),
                summary=f"A line for each run; its marks are turning points. {endings}",
                columns=columns,
                variants=variants,
                where={"run": member_names},
                plots=("macs", "epoch"),
            )
        )
    notes = []
    if old and known:
        notes.append(f"Missing against BitFusion energy and latency: {', '.join(old)}, which have none of some epochs.")
    return Panel(
        "trajectory",
        "Trajectory",
        "Where each run stood when it had cost this much (figure 6 of the paper). Lower cost is further left, on a "
        "logarithmic axis; a mark is a turning point, after which the next stage began.",
        tuple(figures),
        (Control("axis", "Cost axis", axes),),
        tuple(notes),
    )


def _epochs_with(measure: str, run: Run) -> int:
    return sum(_value_of(measure, record) is not None for record in run.records)


def _value_of(measure: str, record: EpochRecord) -> float | None:
    return record.value if measure == "value" else record.row.loss


def _ending(run: Run, measure: str, title: str) -> str:
    record = run.records[-1]
    value = _value_of(measure, record)
    shown = "no finite value" if value is None else f"{value:.4g}"
    return f"{run.name}: {title} {shown} after {record.row.epoch} epochs and {record.total_macs:.4g} MACs."


def _unit(name: str, metric: str) -> str:
    return f"{name}, %" if metric == "accuracy" else name


def _chart(
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
        axis: one of ``_AXES``.
        runs: all runs of the report, so that each has its colour.
        shown: the runs that have this measure and this cost.
        single: those of them with the measure of one epoch, which a line would not show.
        turning: whether one of them has turning points.
    """
    focus = alt.selection_point(name="focus", fields=["run"], bind="legend")
    ticks = alt.Axis(format=number_format(axis), tickCount=8)
    legend = alt.Legend(values=list(shown))
    base = (
        alt.Chart(alt.NamedData(name="epochs"))
        .transform_filter(alt.FieldOneOfPredicate(field="run", oneOf=list(shown)))
        .transform_filter(f"isValid(datum['{measure}']) && datum['{axis}'] > 0")
        .encode(
            x=alt.X(f"{axis}:Q", title=_AXES[axis], axis=ticks, scale=_fit(axis)),
            y=alt.Y(f"{measure}:Q", title=title, scale=alt.Scale(zero=False)),
            color=run_colour(runs, legend=legend),
            opacity=alt.condition(focus, alt.value(1), alt.value(0.12)),
        )
    )
    tooltips = [
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
    points = points.encode(shape=alt.Shape("run:N", title=None, scale=alt.Scale(domain=list(runs)), legend=legend))
    hover = base.mark_circle(size=110).encode(opacity=alt.condition(near, alt.value(1), alt.value(0)), tooltip=tooltips)
    # Vega warns of a layer without a point, so these are drawn only where they have one
    layers = [line, *([alone] if single else []), *([points] if turning else [])]
    return plain(alt.layer(*layers, hover.add_params(near)).add_params(focus), height=340)


def _fit(axis: str) -> alt.Scale:
    """Costs by their order of magnitude: float costs some twenty times what the runs beside it cost."""
    return alt.Scale(zero=False, nice=False) if axis == "epoch" else alt.Scale(type="log", nice=False)
