"""Schedules move a run from one stage to the next: one protocol, and the schedules of ``FracConfig``.

The *level* of a stage is a ``Precision`` (PFQ) or a target cp in per cent (FracTrain). A schedule only gives positions
in a tuple of levels. :func:`plan_stages` makes schedule and levels together, because some schedules also choose the
levels: two-stage keeps the ends, and cyclic interpolates between them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeAlias, runtime_checkable

from fractrain_fx.config import FracConfig
from fractrain_fx.config.clock import windows_of
from fractrain_fx.config.precision import Precision
from fractrain_fx.engine.indicator import LossPlateau
from fractrain_fx.errors import ConfigError

__all__ = ["AutoSchedule", "EpochSchedule", "Level", "StagePlan", "StageSchedule", "lacks_length", "plan_stages"]

Level: TypeAlias = Precision | float

_TINY = 1e-9  # shares such as 0.1 of 10 windows are not exact in binary


@runtime_checkable
class StageSchedule(Protocol):
    """Anything that maps the losses seen so far to a stage."""

    def update(self, loss: float) -> int:
        """Take the mean task loss of the epoch (or window) that ended; return the stage of the next one (from 0)."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Plain values that continue this schedule elsewhere."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` gave."""
        ...


class AutoSchedule:
    """Algorithm 1: go to the next stage when the loss has stopped falling, until the last."""

    def __init__(self, stages: int, plateau: LossPlateau) -> None:
        self._last = stages - 1
        self._plateau = plateau
        self._stage = 0

    def update(self, loss: float) -> int:
        if self._stage < self._last and self._plateau.update(loss):
            self._stage += 1
        return self._stage

    def state_dict(self) -> dict[str, Any]:
        return {"stage": self._stage, "plateau": self._plateau.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._plateau.load_state_dict(state["plateau"])
        self._stage = int(state["stage"])


class EpochSchedule:
    """A stage for each epoch (or window), fixed beforehand; after the last one its stage holds."""

    def __init__(self, stages: tuple[int, ...]) -> None:
        self._stages = stages
        self._epoch = 0

    def update(self, loss: float) -> int:
        self._epoch += 1
        return self._stages[min(self._epoch, len(self._stages) - 1)]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._epoch = int(state["epoch"])


@dataclass(frozen=True)
class StagePlan:
    """The levels of a run's stages and the schedule that walks over them, starting at the first."""

    levels: tuple[Level, ...]
    schedule: StageSchedule

    def __post_init__(self) -> None:
        for name in ("update", "state_dict", "load_state_dict"):
            if not callable(getattr(self.schedule, name, None)):
                raise ConfigError(
                    f"schedule={self.schedule!r} has no method {name}(): give an object such as docs/own-schedule.md "
                    "shows, or name a schedule in the configuration"
                )


def plan_stages(config: FracConfig, levels: tuple[Level, ...]) -> StagePlan:
    """The schedule that a configuration names, with the levels of its stages.

    ``auto`` walks over all of them and ``two-stage`` over the first and the last, both by Algorithm 1; ``manual`` gives
    each the same number of epochs, or of windows where ``every`` counts steps or tokens; ``cyclic`` (CPT, arXiv
    2101.09868) repeats half a cosine from the first to the last, rounded to whole bits for precisions; ``fixed`` begins
    each at its turn; ``constant`` holds the last.

    Raises:
        ConfigError: a cyclic schedule has less than two epochs a cycle, a manual one less than one a stage, the turns
            do not fit the stages, or the length of the run is needed and not known.
    """
    if config.schedule == "constant" or len(levels) == 1:
        return StagePlan(levels[-1:], EpochSchedule((0,)))
    if config.schedule == "cyclic":
        return _cyclic(levels, config, _windows(config))
    if config.schedule == "manual":
        windows = _windows(config)
        if windows < len(levels):
            parts = "epochs" if config.every is None else "windows of 'every'"
            raise ConfigError(
                f"schedule='manual' gives {len(levels)} stages equal parts of the run, and {windows} {parts} are too "
                "few for that: train longer, take fewer stages, or schedule='constant' for the last stage only"
            )
        return StagePlan(levels, EpochSchedule(tuple(window * len(levels) // windows for window in range(windows))))
    if config.schedule == "fixed":
        return StagePlan(levels, EpochSchedule(_fixed(len(levels), config)))
    if config.schedule == "two-stage":
        levels = (levels[0], levels[-1])
    return StagePlan(levels, AutoSchedule(len(levels), LossPlateau(config.epsilon, config.alpha)))


def lacks_length(config: FracConfig, levels: tuple[Level, ...]) -> bool:
    """Whether :func:`plan_stages` would need the length of the run, which the configuration does not say."""
    shares = config.schedule == "fixed" and any(isinstance(turn, float) for turn in config.turns)
    divides = config.schedule in ("manual", "cyclic") or shares
    return divides and len(levels) > 1 and windows_of(config) is None


def _windows(config: FracConfig) -> int:
    windows = windows_of(config)
    if windows is None:
        say = "epochs=..." if config.every is None else f"length={type(config.every).__name__}(...)"
        raise ConfigError(f"schedule={config.schedule!r} divides a run into parts: say how long it is with {say}")
    return windows


def _fixed(stages: int, config: FracConfig) -> tuple[int, ...]:
    """The stage of each window. A stage begins with the first window that begins at its turn or later."""
    if len(config.turns) != stages - 1:
        raise ConfigError(f"{stages} stages have {stages - 1} turning points, and turns has {len(config.turns)}")
    places = [
        turn * _windows(config) if isinstance(turn, float) else turn.number / _every(config) for turn in config.turns
    ]
    starts = [math.ceil(place - _TINY) for place in places]
    windows = windows_of(config)
    ends = [0, *starts, *([] if windows is None else [windows])]
    if any(before >= after for before, after in pairwise(ends)):
        window = "an epoch" if config.every is None else str(config.every)
        raise ConfigError(
            f"turns=({', '.join(map(str, config.turns))}) leave a stage without {window}: write turns that are further "
            "apart and before the run's end, or a smaller every"
        )
    return tuple(sum(window >= start for start in starts) for window in range(starts[-1] + 1))


def _every(config: FracConfig) -> int:
    return 1 if config.every is None else config.every.number


def _cyclic(levels: tuple[Level, ...], config: FracConfig, epochs: int) -> StagePlan:
    cycles, unit = config.cycles, "epochs" if config.every is None else f"windows of {config.every}"
    if epochs < 2 * cycles:
        raise ConfigError(
            f"{cycles} cycles in {epochs} {unit} leave less than two {unit} a cycle: "
            f"write cycles={max(1, epochs // 2)} or fewer, or train longer"
        )
    each_epoch: list[Level] = []
    for cycle in range(cycles):
        length = (cycle + 1) * epochs // cycles - cycle * epochs // cycles
        # Both ends belong to the cycle, so that each cycle, and therefore the run, ends at the full level.
        each_epoch += [_between(levels[0], levels[-1], epoch / (length - 1)) for epoch in range(length)]
    distinct = tuple(dict.fromkeys(each_epoch))
    return StagePlan(distinct, EpochSchedule(tuple(distinct.index(level) for level in each_epoch)))


def _between(low: Level, high: Level, position: float) -> Level:
    """The level at ``position`` (0..1) of a half cosine from ``low`` to ``high``."""
    share = (1 - math.cos(math.pi * position)) / 2
    if isinstance(low, Precision) and isinstance(high, Precision):
        fw, bw = (round(start + share * (end - start)) for start, end in ((low.fw, high.fw), (low.bw, high.bw)))
        return Precision(fw, bw)
    if isinstance(low, Precision) or isinstance(high, Precision):
        raise ConfigError(f"stages {low} and {high} are of two kinds: write precisions or targets, not both")
    return low + share * (high - low)
