"""The tables behind the plots: each plot reads one of these, and the page shows the same rows as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fractrain_fx.config.precision import Precision
from fractrain_fx.engine.rows import cost_share
from fractrain_fx.engine.steered import show_level
from fractrain_fx.report.runs import Run
from fractrain_fx.summary.numbers import plain_number, time_unit
from fractrain_fx.training.log.records import EpochRecord

__all__ = [
    "PATHS",
    "QUANTITIES",
    "Row",
    "Scope",
    "allocation_rows",
    "bits_rows",
    "block_rows",
    "epoch_rows",
    "information_rows",
    "machine_rows",
    "path_rows",
    "sample_rows",
    "segment_rows",
    "stage_rows",
]

Row = dict[str, Any]
Scope = str  # "end" or "best": the evaluation until which cost is summed

PATHS = {"FW": "forward (FW)", "EB": "error backward (EB)", "GC": "weight gradient (GC)"}
QUANTITIES = ("macs", "joules", "seconds")


def epoch_rows(runs: Iterable[Run]) -> list[Row]:
    """A row for each epoch: measures as in ``metrics.jsonl``, shares of cost in per cent, BitFusion's sums so far."""
    return [row for run in runs for row in _epochs_of(run)]


def _epochs_of(run: Run) -> list[Row]:
    rows: list[Row] = []
    targets = {record.row.epoch: stage.target for stage in run.stages for record in stage.records}
    joules: float | None = 0.0 if run.records[0].row.epoch == 1 else None  # the cost of lost epochs is not known
    seconds = joules
    for record in run.records:
        row = record.row
        joules, seconds = _plus(joules, record.bitfusion_joules), _plus(seconds, record.bitfusion_seconds)
        rows.append(
            {
                "run": run.name,
                "epoch": row.epoch,
                "stage": row.stage + 1,
                "level": show_level(row.level),
                "loss": row.loss,
                "value": record.value,
                "test_loss": record.test_loss,
                "cp": 100 * row.cp,
                "target": targets[row.epoch],
                "cp_total": 100 * row.cp_total,
                "macs": record.total_macs,
                "joules": joules,
                "bitfusion_seconds": seconds,
                "hours": record.seconds / 3600,
                "turning": row.epoch in run.turning_points,
            }
        )
    return rows


def segment_rows(run: Run) -> list[Row]:
    """A row for each period of a stage."""
    return [
        {
            "run": run.name,
            "level": show_level(stage.records[0].row.level),
            "stage_index": index,
            "first": stage.first,
            "last": stage.last,
            "target": stage.target,
        }
        for index, stage in enumerate(run.stages)
    ]


def stage_rows(runs: Iterable[Run]) -> list[Row]:
    """A row for each stage of each run: simulated cost, BitFusion's estimate and the measured time."""
    rows: list[Row] = []
    for run in runs:
        grouped: dict[str, list[EpochRecord]] = {}
        names = {stage.shown: stage.name for stage in run.stages}
        for stage in run.stages:
            grouped.setdefault(stage.shown, []).extend(stage.records)
        seconds = _epoch_seconds(run)
        priced = {} if run.result is None else run.result.hardware["end"]["by_stage"]
        for name, records in sorted(grouped.items(), key=lambda item: item[1][0].row.stage):
            epochs = {record.row.epoch for record in records}
            rows_of_stage = [record.row for record in records]
            steps = sum(record.steps for record in records)
            bitfusion = _sum_known(record.bitfusion_seconds for record in records)
            measured = sum(record.train_seconds for record in records)
            joules = _sum_known(record.bitfusion_joules for record in records)
            if bitfusion is None and (price := priced.get(names[name])):  # an epoch had several stages
                bitfusion, joules = price["seconds"] or None, price["joules"] or None
            rows.append(
                {
                    "key": f"{run.name}\n{name}",
                    "run": run.name,
                    "stage": name,
                    "epochs": len(epochs),
                    "cp": 100 * cost_share(rows_of_stage, "cp"),
                    "cp_total": 100 * cost_share(rows_of_stage, "cp_total"),
                    "joules_step": _ratio(joules, steps),
                    "bitfusion_step": _ratio(bitfusion, steps, 1e3),
                    "measured_step": _ratio(measured, steps, 1e3),
                    "epoch_seconds": sum(seconds[epoch] for epoch in epochs) / len(epochs),
                }
            )
    return rows


def allocation_rows(run: Run) -> list[Row]:
    """For each block and option the share of samples that chose it, in each epoch; for gated runs."""
    bits = [None if name.startswith("option") else Precision.parse(name).fw for name in run.options]
    return [
        {
            "epoch": record.row.epoch,
            "block": block,
            "option": option,
            "order": order,
            "bits": bits[order],
            "share": 100 * share,
        }
        for record in run.records
        for block, shares in record.row.options.items()
        for order, (option, share) in enumerate(zip(run.options, shares, strict=True))
    ]


def bits_rows(run: Run) -> list[Row]:
    """Mean bits of each block's forward pass at each epoch, where skipping counts as 0; for gated runs."""
    rows: list[Row] = []
    for part in allocation_rows(run):
        if part["order"] == 0:
            rows.append({"epoch": part["epoch"], "block": part["block"], "bits": 0.0})
        rows[-1]["bits"] += part["share"] / 100 * part["bits"]
    return rows


def information_rows(runs: Iterable[Run]) -> list[Row]:
    """How far the gates chose by input at each epoch; for gated runs."""
    return [
        {
            "run": run.name,
            "epoch": record.row.epoch,
            "information": record.mutual_information,
            "configurations": record.configurations,
            "commonest": None if record.commonest is None else 100 * record.commonest,
        }
        for run in runs
        for record in run.records
        if record.mutual_information is not None
    ]


def sample_rows(run: Run) -> list[Row]:
    """The test images that the gates spent fewest and most bits on, each end from its extreme on."""
    half = len(run.samples) // 2
    ends = {"fewest bits": run.samples[:half], "most bits": tuple(reversed(run.samples[half:]))}
    return [
        {"end": end, "place": place, "cp": 100 * sample.cp, "picture": sample.picture}
        for end, samples in ends.items()
        for place, sample in enumerate(samples, start=1)
        if sample.picture is not None
    ]


def path_rows(runs: Iterable[Run], scope: Scope) -> list[Row]:
    """The cost of forward, error backward and weight gradient over whole runs, for finished runs."""
    return [
        {"run": run.name, "path": PATHS[path], "path_order": order, **amount}
        for run in runs
        if run.result is not None
        for order, (path, amount) in enumerate(run.result.hardware[scope]["by_path"].items())
    ]


def block_rows(run: Run, scope: Scope) -> list[Row]:
    """The cost of each block of a finished run, by path."""
    if run.result is None:
        return []
    rows: list[Row] = []
    for block, amount in run.result.hardware[scope]["by_block"].items():
        for order, (path, part) in enumerate(amount["paths"].items()):
            costs = {quantity: part[quantity] for quantity in QUANTITIES}
            rows.append({"block": block or "(no block)", "path": PATHS[path], "path_order": order} | costs)
    return rows


def machine_rows(runs: Iterable[Run]) -> list[Row]:
    """What each finished run would take on each machine that has a price for it, beside float; by machine."""
    priced = [(run.name, estimate) for run in runs if run.result is not None for estimate in run.result.machines]
    order = list(dict.fromkeys(estimate.machine for _, estimate in priced))
    unit, size = time_unit(estimate.seconds for _, estimate in priced if estimate.seconds is not None)
    return [
        {
            "machine": estimate.machine,
            "run": run,
            "seconds": estimate.seconds,
            "float32": estimate.float32,
            "bfloat16": estimate.bfloat16,
            "of_float32": _ratio(estimate.seconds, estimate.float32, 100),
            "bfloat16_of_float32": _ratio(estimate.bfloat16, estimate.float32, 100),
            "joules": estimate.joules,
            "float32_joules": estimate.float32_joules,
            **{bound: 100 * estimate.bounds.get(bound, 0.0) for bound in ("compute", "memory", "rounding")},
            "wider": ", ".join(estimate.wider),
            "unpriced": len(estimate.unpriced),
            "label": f"{plain_number(estimate.seconds / size)} {unit}{' *' if estimate.wider else ''}",
        }
        for run, estimate in sorted(priced, key=lambda pair: order.index(pair[1].machine))
        if estimate.seconds is not None
    ]


def _epoch_seconds(run: Run) -> dict[int, float]:
    """Wall time of each epoch, evaluation included; of the first after lost ones, of its training alone."""
    first = run.records[0]
    begins = 0.0 if first.row.epoch == 1 else first.seconds - first.train_seconds
    ends: Sequence[float] = [begins, *(record.seconds for record in run.records)]
    return {record.row.epoch: ends[index + 1] - ends[index] for index, record in enumerate(run.records)}


def _plus(total: float | None, more: float | None) -> float | None:
    return None if total is None or more is None else total + more


def _sum_known(values: Iterable[float | None]) -> float | None:
    """The sum; ``None`` if a value is not known."""
    total: float | None = 0.0
    for value in values:
        total = _plus(total, value)
    return total


def _ratio(value: float | None, by: float | None, factor: float = 1.0) -> float | None:
    return None if value is None or not by else factor * value / by
