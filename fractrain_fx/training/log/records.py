"""What a run keeps of each epoch and of each start: the lines of ``metrics.jsonl`` and ``starts.jsonl``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from fractrain_fx.engine.dependence import InputDependence
from fractrain_fx.engine.ledger import EpochRow
from fractrain_fx.training.log.extremes import Sample

__all__ = ["METRICS", "STARTS", "EpochRecord", "Evaluation", "Start", "keep_start"]

METRICS, STARTS = "metrics.jsonl", "starts.jsonl"
_ROW = tuple(field.name for field in fields(EpochRow))


class Evaluation(NamedTuple):
    """A pass over the test samples.

    Attributes:
        loss: mean loss.
        value: of the objective's measure.
        dependence: how far the gates' choices depend on the sample; ``None`` without gates.
        samples: those that the gates spent most and fewest bits on, by cost; none without gates.
    """

    loss: float
    value: float
    dependence: InputDependence | None
    samples: list[Sample]


@dataclass(frozen=True)
class EpochRecord:
    """One epoch as a line of ``metrics.jsonl`` holds it.

    Attributes:
        row: of the ledger.
        metric: name of the test measure.
        value: the measure on the test samples, in per cent if it is an accuracy; ``None`` where it was not finite.
        test_loss: mean loss on the test samples.
        lr: learning rate of the epoch's first step.
        total_macs: training cost up to here in full-precision MACs.
        seconds: wall time up to here, evaluation included.
        steps: optimizer steps of this epoch.
        train_seconds: wall time of those steps and of the data they wait for, without evaluation.
        bitfusion_joules, bitfusion_seconds: what this epoch costs on BitFusion.
        mutual_information, configurations, commonest: how far the gates chose by input on the test samples
            (:class:`fractrain_fx.engine.InputDependence`); ``None`` without gates.

    Runs of older versions have ``None`` for what they did not keep.
    """

    row: EpochRow
    metric: str
    value: float | None
    test_loss: float | None
    lr: float
    total_macs: float
    seconds: float
    steps: int | None = None
    train_seconds: float | None = None
    bitfusion_joules: float | None = None
    bitfusion_seconds: float | None = None
    mutual_information: float | None = None
    configurations: int | None = None
    commonest: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """One flat mapping; the measure is under ``test_`` and its name."""
        own = {name: value for name, value in vars(self).items() if name not in ("row", "metric", "value")}
        return asdict(self.row) | {f"test_{self.metric}": self.value} | own

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EpochRecord:
        """Read what ``to_dict`` gave.

        Raises:
            KeyError, TypeError, ValueError: it is not that.
        """
        row = EpochRow(**{name: values[name] for name in _ROW if name in values})
        options = {block: tuple(float(share) for share in shares) for block, shares in row.options.items()}
        (measure,) = (name for name in values if name.startswith("test_") and name != "test_loss")
        own = {field.name for field in fields(cls)} - {"row", "metric", "value"}
        return cls(
            row=EpochRow(**vars(row) | {"options": options}),
            metric=measure.removeprefix("test_"),
            value=values[measure],
            **{name: values[name] for name in own & values.keys()},
        )


@dataclass(frozen=True)
class Start:
    """How a run was started, or continued, from the command line.

    Attributes:
        command: as it was typed.
        epoch: epochs that were already done.
        device: what it ran on.
        processes: how many trained together.
        versions: of Python, torch and this package.
    """

    command: str
    epoch: int
    device: str
    processes: int
    versions: dict[str, str]

    @classmethod
    def now(cls, arguments: Sequence[str], *, epoch: int, device: str, processes: int) -> Start:
        """The start of this process by ``fractrain`` with ``arguments``."""
        import platform
        from importlib.metadata import version

        versions = {"python": platform.python_version()} | {name: version(name) for name in ("torch", "fractrain_fx")}
        return cls(shlex.join(["fractrain", *arguments]), epoch, device, processes, versions)


def keep_start(out: Path, start: Start) -> None:
    """Append to the run's ``starts.jsonl``."""
    with (out / STARTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(start)) + "\n")
