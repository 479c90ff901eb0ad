"""The panel of test measure and training loss against the cost so far (paper, figure 6)."""

from __future__ import annotations

from collections.abc import Sequence

from fractrain_fx.report import charts
from fractrain_fx.report.runs import Run
from fractrain_fx.report.sheet import Column, Control, Figure, Panel, Variant
from fractrain_fx.training.log.records import EpochRecord

__all__ = ["trajectories"]


def trajectories(runs: Sequence[Run]) -> Panel:
    """The panel; each figure can be drawn against several kinds of cost."""
    names = [run.name for run in runs]
    metrics = list(dict.fromkeys(run.metric for run in runs))
    old = [run.name for run in runs if any(record.bitfusion_joules is None for record in run.records)]
    known = len(old) < len(names)
    bitfusion = {"joules": "BitFusion energy", "bitfusion_seconds": "BitFusion latency"} if known else {}
    axes = {"macs": "full-precision MACs"} | bitfusion | {"hours": "measured time", "epoch": "epochs"}
    figures = []
    for measure, title, members in [
        *(("value", _unit(f"test {metric}", metric), [r for r in runs if r.metric == metric]) for metric in metrics),
        ("loss", "training loss", list(runs)),
    ]:
        own = [run.name for run in members]
        heading = title.partition(",")[0]
        variants = {}
        for axis in axes:
            shown = [run for run in members if run.name not in old or axis not in bitfusion]
            if not shown:
                continue
            spec = charts.trajectory(
                measure,
                title,
                axis,
                names,
                [run.name for run in shown],
                single=[run.name for run in shown if _epochs_with(measure, run) == 1],
                turning=any(run.turning_points for run in shown),
            )
            against = charts.AXES[axis].partition(",")[0]
            variants[axis] = Variant(spec, ("epochs",), f"{heading[0].upper()}{heading[1:]} against {against}")
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
        told = " ".join(_ending(run, measure, title) for run in members)
        figures.append(
            Figure(
                key="trajectory-" + (members[0].metric if measure == "value" else "loss"),
                summary=f"A line for each run; its marks are turning points. {told}",
                columns=columns,
                variants=variants,
                where={"run": own},
                plots=("macs", "epoch"),
            )
        )
    notes = []
    if old and known:
        notes.append(f"Missing against BitFusion energy and latency: {', '.join(old)}, which have none by epoch.")
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
