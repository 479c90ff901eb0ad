"""Records of each epoch and of each start of a run: the lines of ``metrics.jsonl`` and ``starts.jsonl``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from fractrain_fx.config.kinds import check_kinds
from fractrain_fx.durable import writing
from fractrain_fx.engine.dependence import InputDependence
from fractrain_fx.engine.rows import EpochRow
from fractrain_fx.errors import RunError
from fractrain_fx.training.log.extremes import Sample

__all__ = ["METRICS", "RESULT", "SETTINGS", "STARTS", "EpochRecord", "Evaluation", "Start", "keep_start", "kept_lines"]

SETTINGS, METRICS, STARTS, RESULT = "config.yaml", "metrics.jsonl", "starts.jsonl", "result.json"
_ROW = tuple(field.name for field in fields(EpochRow))


class Evaluation(NamedTuple):
    """A pass over the test samples.

    Attributes:
        loss: mean loss.
        value: the objective's measure.
        dependence: how far the gates' choices depend on the sample; ``None`` without gates.
        samples: those that the gates spent most and fewest bits on, by cost; none without gates.
    """

    loss: float
    value: float
    dependence: InputDependence | None
    samples: list[Sample]


@dataclass(frozen=True)
class EpochRecord:
    """One epoch as a line of ``metrics.jsonl``.

    Attributes:
        row: the row of the ledger.
        metric: name of the test measure.
        value: the measure on the test samples, in per cent if it is an accuracy; ``None`` if it was not finite.
        test_loss: mean loss on the test samples.
        lr: learning rate of the epoch's first step.
        total_macs: training cost so far in full-precision MACs.
        seconds: wall time so far, with evaluation.
        steps: optimizer steps of this epoch.
        train_seconds: wall time of those steps and of the data they wait for, without evaluation.
        bitfusion_joules, bitfusion_seconds: cost of this epoch on BitFusion; ``None`` if it prices no op.
        mutual_information, configurations, commonest: how far the gates chose by input on the test samples
            (:class:`fractrain_fx.engine.InputDependence`); ``None`` without gates.
    """

    row: EpochRow
    metric: str
    value: float | None
    test_loss: float | None
    lr: float
    total_macs: float
    seconds: float
    steps: int
    train_seconds: float
    bitfusion_joules: float | None = None
    bitfusion_seconds: float | None = None
    mutual_information: float | None = None
    configurations: int | None = None
    commonest: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """One flat mapping; the measure is under ``test_`` and its name."""
        others = {name: value for name, value in vars(self).items() if name not in ("row", "metric", "value")}
        return asdict(self.row) | {f"test_{self.metric}": self.value} | others

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EpochRecord:
        """Read the result of ``to_dict``.

        Raises:
            KeyError, TypeError, ValueError: ``values`` is something else.
        """
        row = EpochRow.from_dict({name: values[name] for name in _ROW if name in values})
        (measure,) = (name for name in values if name.startswith("test_") and name != "test_loss")
        names = {field.name for field in fields(cls)} - {"row", "metric", "value"}
        record = cls(
            row=row,
            metric=measure.removeprefix("test_"),
            value=values[measure],
            **{name: values[name] for name in names & values.keys()},
        )
        check_kinds(record)
        return record


@dataclass(frozen=True)
class Start:
    """A start or continuation of a run from the command line.

    Attributes:
        command: the command line.
        epoch: epochs that were already trained.
        device: the device.
        processes: number of processes that trained together.
        versions: versions of Python, torch and this package.
    """

    command: str
    epoch: int
    device: str
    processes: int
    versions: dict[str, str]

    @classmethod
    def now(cls, arguments: Sequence[str], *, epoch: int, device: str, processes: int) -> Start:
        """The record of a start now, with the given arguments of ``fractrain``."""
        import platform
        from importlib.metadata import version

        versions = {"python": platform.python_version()} | {name: version(name) for name in ("torch", "fractrain_fx")}
        return cls(shlex.join(["fractrain", *arguments]), epoch, device, processes, versions)


def keep_start(out: Path, start: Start) -> None:
    """Append to the run's ``starts.jsonl``.

    Raises:
        RunError: the disk is full, or the folder cannot be written to.
    """
    with writing(out / STARTS), (out / STARTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(start)) + "\n")


def kept_lines(metrics: Path, epoch: int) -> list[str]:
    """The lines of a file of metrics up to an epoch; later ones were written after the checkpoint of that epoch.

    Without a file there are none.

    Raises:
        RunError: a line is not the record of its epoch, or lines are missing at the end.
    """
    if epoch == 0 or not metrics.exists():
        return []
    lines: list[str] = []
    last: int | None = None
    try:
        for line in metrics.read_text(encoding="utf-8").splitlines():
            record = EpochRecord.from_dict(json.loads(line)).row.epoch
            if last is not None and record != last + 1:
                raise ValueError(f"epoch {record} follows epoch {last}")
            lines, last = [*lines, f"{line}\n"], record
            if record >= epoch:
                break
        if last != epoch:
            raise ValueError(f"it ends with epoch {last}" if last else "it is empty")
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(
            f"{metrics} is damaged, or not that of the checkpoint after epoch {epoch} ({error}): restore it from a "
            "copy, or rename it to go on without the lines so far"
        ) from error
    return lines
