"""The course of a run over its stages: the plan, the present stage, and what there is to say about both."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from fractrain_fx.config import ByLength, FracConfig
from fractrain_fx.engine.ledger import Ledger
from fractrain_fx.engine.rows import EpochRow, pure_rows, stages_text, table
from fractrain_fx.engine.schedules import Level, LoopLength, StagePlan, StageSchedule, plan_stages, unit_of
from fractrain_fx.engine.steered import SteeredModel, level_text, show_level
from fractrain_fx.errors import FracTrainWarning

__all__ = ["Course", "Stage", "Staged", "SteeredRun"]

_log = logging.getLogger("fractrain_fx")
_UNTOLD = (
    "the engine does not know how long this run is, so its stages follow Algorithm 1, which begins the last of "
    "{stages} after {soonest} {unit} at the soonest, and maybe never: write Engine(model, {say}), with which every "
    "stage begins in time"
)


class Course:
    """The stages of a run, by ``schedule`` or else by the one that the configuration names.

    ``epochs`` are those of the loop, if the configuration does not say them.
    """

    def __init__(
        self, config: FracConfig, levels: tuple[Level, ...], schedule: StageSchedule | None, epochs: int | None = None
    ) -> None:
        self._config, self._levels, self._given = config, levels, schedule
        self._length = LoopLength(epochs=config.run.epochs if epochs is None else epochs)
        self._complaint: str | None = None
        self._told = False
        self._adopt(None)

    def expect(self, length: LoopLength) -> None:
        """Plan the stages for a loop of this length, before it begins."""
        self._length = length
        self._adopt(length)

    def _adopt(self, length: LoopLength | None) -> None:
        self.plan = plan_stages(self._config, self._levels, length)
        if self._given is not None:
            name = f"the schedule {type(self._given).__name__}"
            self.plan = StagePlan(
                self._levels, self._given, windows=self.plan.windows, every=self.plan.every, name=name
            )
        self.stage = self.plan.first
        complaint = self.plan.too_short
        if complaint is not None and complaint != self._complaint:
            warnings.warn(complaint, FracTrainWarning, stacklevel=4)
        self._complaint = complaint

    @property
    def levels(self) -> tuple[Level, ...]:
        """The level of each stage."""
        return self.plan.levels

    @property
    def level(self) -> Level:
        """The level of the present stage."""
        return self.plan.levels[self.stage]

    @property
    def texts(self) -> tuple[str, ...]:
        """The levels as files keep them."""
        return tuple(map(level_text, self.levels))

    def begin(self) -> None:
        """Say how the stages of this run are chosen, once, in its first step."""
        if self._told:
            return
        self._told = True
        stages = len(self.levels)
        if stages == 1:
            return
        _log.info("%d stages by %s", stages, self.plan.name)
        if self.plan.windows is None and isinstance(self._config.schedule, ByLength) and self._given is None:
            every = self.plan.every
            say = "epochs=..." if every is None else f"length={type(every).__name__}(...)"
            words = _UNTOLD.format(stages=stages, soonest=self.plan.soonest, unit=unit_of(every), say=say)
            warnings.warn(words, FracTrainWarning, stacklevel=3)

    @contextmanager
    def unchanged_on_error(self, *others: object) -> Iterator[None]:
        """Put back the attributes of this course and of others, and the state of the schedule, after an error."""
        schedule = self.plan.schedule
        state, held = copy.deepcopy(schedule.state_dict()), [(part, dict(vars(part))) for part in (self, *others)]
        try:
            yield
        except Exception:
            schedule.load_state_dict(state)
            for part, attributes in held:
                vars(part).update(attributes)
            raise

    def end_epoch(self, rows: Sequence[EpochRow]) -> None:
        """Say which stages the run had, if it ends with this epoch."""
        if len(rows) != self._length.epochs or len(self.levels) == 1:
            return
        text = stages_text(rows, self.texts)
        _log.info("%s", text)
        if all(part.stage != len(self.levels) - 1 for part in pure_rows(rows)):
            warnings.warn(f"this run ended before its last stage. {text}", FracTrainWarning, stacklevel=3)


@dataclass(frozen=True)
class SteeredRun:
    """The training of a model: where it is among its stages, and what its epochs cost."""

    course: Course
    ledger: Ledger


@dataclass(frozen=True)
class Stage:
    """The stage that a model is in. Prints as ``2 of 4, FW-4/BW-6``.

    Attributes:
        number: counted from 1.
        count: the number of stages.
        level: a precision, or a target cp in per cent.
    """

    number: int
    count: int
    level: Level

    def __str__(self) -> str:
        return f"{self.number} of {self.count}, {show_level(self.level)}"


class Staged:
    """The part of an engine that only reads."""

    model: SteeredModel
    ledger: Ledger
    _course: Course

    @property
    def stage(self) -> int:
        """The present stage, counted from 0."""
        return self._course.stage

    @property
    def level(self) -> Level:
        """The level of the present stage: a precision, or a target cp in per cent."""
        return self._course.level

    @property
    def levels(self) -> tuple[Level, ...]:
        """The level of each stage."""
        return self._course.levels

    @property
    def schedule(self) -> str:
        """How the run goes from stage to stage, in words."""
        return self._course.plan.name

    def __repr__(self) -> str:
        """A table of the stages, with what was trained in each so far."""
        parts = pure_rows(self.ledger.rows)
        samples = [sum(part.samples for part in parts if part.stage == stage) for stage in range(len(self.levels))]
        lines = [
            (">" if stage == self.stage else "", str(stage + 1), show_level(level), f"{count:,}")
            for stage, (level, count) in enumerate(zip(self.levels, samples, strict=True))
        ]
        stages = f"stage {self.stage + 1} of {len(self.levels)}" + (f" by {self.schedule}" if len(lines) > 1 else "")
        return f"Engine: {self.model.frac_config.method}, {stages}\n" + table(("", "stage", "level", "samples"), lines)
