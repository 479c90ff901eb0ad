"""Read folders of runs as typed records, and explain runs that cannot be read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path

from fractrain_fx.engine.rows import EpochRow, cost_share, turning_rows
from fractrain_fx.engine.steered import show_level
from fractrain_fx.errors import RunError
from fractrain_fx.training.log.extremes import SAMPLES, Sample, read_samples
from fractrain_fx.training.log.records import METRICS, RESULT, SETTINGS, STARTS, EpochRecord, Start
from fractrain_fx.training.log.results import RunResult
from fractrain_fx.training.settings import RunSettings

__all__ = ["Run", "StageSpan", "read_run", "read_runs"]

_TARGET = re.compile(r"cp (\S+) %")


@dataclass(frozen=True)
class StageSpan:
    """Consecutive epochs of one stage; of an epoch in which the stage changed, the part in this stage.

    Attributes:
        name: number (from 1) and level, as in ``result.json``.
        target: target cp in per cent, if gates are steered.
        records: the epochs.
    """

    name: str
    target: float | None
    records: tuple[EpochRecord, ...]

    @property
    def shown(self) -> str:
        """Number and level as the page shows them."""
        row = self.records[0].row
        return f"{row.stage + 1}: {show_level(row.level)}"

    @property
    def first(self) -> int:
        """Its first epoch."""
        return self.records[0].row.epoch

    @property
    def last(self) -> int:
        """Its last epoch."""
        return self.records[-1].row.epoch


@dataclass(frozen=True)
class Run:
    """One run, as far as it went.

    Attributes:
        name: name in the report.
        path: its folder, or its metrics file.
        records: an entry for each epoch whose line was not lost, at least one.
        settings: the configuration; ``None`` for a metrics file alone.
        result: the result with the cost by path and block; ``None`` until the run is finished.
        starts: the commands that started and continued it.
        samples: the test samples that its gates spent least and most on, by cost; none without gates.
        notes: missing parts, and how to get them.
    """

    name: str
    path: Path
    records: tuple[EpochRecord, ...]
    settings: RunSettings | None
    result: RunResult | None
    starts: tuple[Start, ...]
    samples: tuple[Sample, ...]
    notes: tuple[str, ...]

    @property
    def metric(self) -> str:
        """The test measure."""
        return self.records[0].metric

    @cached_property
    def stages(self) -> tuple[StageSpan, ...]:
        """The stages in time order; a cyclic schedule returns to earlier ones."""
        parts = (part for record in self.records for part in _parts(record))
        return tuple(_stage(group) for _, group in groupby(parts, lambda part: part.row.stage))

    @property
    def turning_points(self) -> tuple[int, ...]:
        """Epochs in or after which another stage began."""
        return tuple(row.epoch for row in self._turns)

    @property
    def turning_texts(self) -> tuple[str, ...]:
        """The turning points as people read them: the epoch, with the step if the stage changed inside it."""
        inside = {part.step for record in self.records for part in record.row.parts[:-1]}
        return tuple(f"{row.epoch} (step {row.step})" if row.step in inside else str(row.epoch) for row in self._turns)

    @property
    def _turns(self) -> list[EpochRow]:
        return turning_rows(record.row for record in self.records)

    @property
    def options(self) -> tuple[str, ...]:
        """The options of the gates; empty without gates."""
        width = max((len(shares) for shares in self.records[0].row.options.values()), default=0)
        if self.settings is not None and width:
            return tuple(str(option) for option in self.settings.frac.gate_options)
        return tuple(f"option {number}" for number in range(1, width + 1))

    @cached_property
    def best(self) -> EpochRecord | None:
        """The epoch with the best measure: the highest accuracy, or the lowest value of another measure."""
        finite = [record for record in self.records if record.value is not None]
        sign = 1 if self.metric == "accuracy" else -1
        return max(finite, key=lambda record: sign * (record.value or 0.0), default=None)

    def mean(self, name: str) -> float:
        """``cp`` or ``cp_total`` of the run, 0..1."""
        if self.result is not None:
            return float(getattr(self.result, f"mean_{name}"))
        return cost_share([record.row for record in self.records], name)


def read_runs(arguments: Sequence[str]) -> list[Run]:
    """Read runs from command-line arguments: ``RUN`` or ``NAME=RUN``.

    Raises:
        RunError: a run cannot be read, or two have the same name.
    """
    named = [_named(argument) for argument in arguments]
    for index, (name, path) in enumerate(named):
        for other, before in named[:index]:
            if before.resolve() == path.resolve():
                raise RunError(f"{path} is given twice: leave one out")
            if other == name:
                raise RunError(
                    f"{before} and {path} are both called {name!r}: name them, for example first={before} second={path}"
                )
    return [read_run(path, name) for name, path in named]


def read_run(path: Path, name: str | None = None) -> Run:
    """Read the folder of a run, or a metrics file alone.

    Raises:
        RunError: there is no run, it has no whole epoch, or one of its files is damaged.
    """
    metrics = path / METRICS if path.is_dir() else path
    if not metrics.is_file():
        raise RunError(_nothing_there(path))
    records, notes = _read_records(metrics, path)
    settings, result = None, None
    starts: tuple[Start, ...] = ()
    samples: tuple[Sample, ...] = ()
    if path.is_dir():
        if (path / SETTINGS).is_file():
            settings = RunSettings.from_yaml(path / SETTINGS)
        if (path / STARTS).is_file():
            starts = _read_starts(path / STARTS)
        if (path / RESULT).is_file():
            result = RunResult.from_json(path / RESULT)
        if (path / SAMPLES).is_file():
            samples = read_samples(path)
    if result is not None and result.epochs != (last := records[-1].row.epoch):
        raise RunError(
            f"{path / RESULT} is about {result.epochs} epochs and {metrics} ends with epoch {last}: they belong to "
            f"different runs, or lines were lost. Restore {metrics}, or remove {path / RESULT}"
        )
    if result is None and path.is_dir():
        notes.append(
            "The run is not through, so its cost by path and block is not known yet. "
            f"Go on with: fractrain train --resume {path}"
        )
    if not path.is_dir():
        notes.append("Only its metrics were given: settings, command and the cost by path and block are in the folder.")
    if settings is not None:
        _refuse_other_options(records[0], settings, path)
    default = path.resolve().name if path.is_dir() else path.stem
    return Run(name or default, path, tuple(records), settings, result, starts, samples, tuple(notes))


def _refuse_other_options(record: EpochRecord, settings: RunSettings, path: Path) -> None:
    known = len(settings.frac.gate_options)
    for block, shares in record.row.options.items():
        if len(shares) != known:
            raise RunError(
                f"{path / METRICS} has {len(shares)} options for {block}, and {path / SETTINGS} names {known}: they "
                "belong to different runs. Restore the one that was changed"
            )


def _named(argument: str) -> tuple[str, Path]:
    name, equals, rest = argument.partition("=")
    if equals and name and rest and not Path(argument).exists():
        return name, Path(rest)
    path = Path(argument)
    return (path.stem if path.is_file() else path.resolve().name), path


def _nothing_there(path: Path) -> str:
    if not path.exists():
        return f"{path} does not exist: give the folder that fractrain train wrote to (its last line names it)"
    if (path / RESULT).is_file():
        return f"{path} has a result and no {METRICS}, of which a report is made: restore that file from a copy"
    if (path / SETTINGS).is_file():
        return (
            f"the run in {path} has not finished its first epoch, so there is nothing to report yet: wait for it, or "
            f"go on with fractrain train --resume {path}"
        )
    inside = sorted(str(file.parent) for file in path.glob(f"*/{METRICS}"))
    if inside:
        return f"{path} is not a run but holds some: fractrain report {' '.join(inside)}"
    return f"{path} holds no run (no {METRICS}): give the folder that fractrain train wrote to"


def _read_records(metrics: Path, path: Path) -> tuple[list[EpochRecord], list[str]]:
    again = f"fractrain train --resume {path} writes it again" if path.is_dir() else "restore it from the run's folder"
    lines = _lines(metrics)
    records: list[EpochRecord] = []
    notes: list[str] = []
    lost = 0  # lines of the first epochs, which a run does without
    for number, line in enumerate(lines, start=1):
        try:
            records.append(EpochRecord.from_dict(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number == len(lines) and not metrics.read_text(encoding="utf-8").endswith("\n"):
                notes.append(f"The last line of {metrics} is cut off, so epoch {number + lost} is left out: {again}.")
                break
            raise RunError(
                f"line {number} of {metrics} is no epoch of a run ({type(error).__name__}: {error}): "
                f"restore the file from a copy, or remove this line and what follows: {again}"
            ) from error
        lost = records[0].row.epoch - 1
        if records[-1].row.epoch != number + lost:
            raise RunError(
                f"line {number} of {metrics} is epoch {records[-1].row.epoch}: lines are missing or doubled. "
                "Restore the file from a copy"
            )
    if not records:
        raise RunError(f"{metrics} holds no whole epoch: wait for the run's first one, or start it again")
    if lost:
        notes.append(f"{metrics} has no lines of the first {lost} epochs, which were lost.")
    return records, notes


def _read_starts(path: Path) -> tuple[Start, ...]:
    try:
        return tuple(Start(**json.loads(line)) for line in _lines(path))
    except (ValueError, TypeError) as error:
        raise RunError(f"{path} holds no commands of a run ({error}): remove it, or restore it from a copy") from error


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path} could not be read ({error}): restore it from a copy") from error


def _parts(record: EpochRecord) -> Iterator[EpochRecord]:
    """An epoch's record for each stage in it. Steps and their time are divided as samples are; BitFusion's are not."""
    row = record.row
    for part in row.parts:
        share = part.samples / row.samples
        yield replace(
            record,
            row=part,
            steps=round(share * record.steps),
            train_seconds=share * record.train_seconds,
            bitfusion_joules=None,
            bitfusion_seconds=None,
        )
    if not row.parts:
        yield record


def _stage(records: Iterable[EpochRecord]) -> StageSpan:
    records = tuple(records)
    row = records[0].row
    target = _TARGET.fullmatch(row.level)
    return StageSpan(f"{row.stage + 1}: {row.level}", None if target is None else float(target[1]), records)
