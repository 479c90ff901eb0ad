"""The plan of a run: the levels of its stages, and the schedule that walks over them.

The *level* of a stage is a ``Precision`` (PFQ) or a target cp in per cent (FracTrain). A schedule only gives positions
in a tuple of levels. :func:`plan_stages` makes schedule and levels together, because some schedules also choose the
levels: two-stage keeps the ends, and cyclic interpolates between them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

from fractrain_fx.config import ByLength, Cyclic, Fixed, FracConfig, Manual, TwoStage
from fractrain_fx.config.clock import Amount, Steps
from fractrain_fx.config.precision import Precision
from fractrain_fx.config.schedule import Plateau
from fractrain_fx.engine.indicator import PlateauIndicator
from fractrain_fx.engine.schedules.kinds import (
    TINY,
    EpochSchedule,
    Level,
    PlateauSchedule,
    StageSchedule,
)
from fractrain_fx.errors import ConfigError

__all__ = ["LoopLength", "StagePlan", "lacks_length", "plan_stages", "unit_of"]

# Losses of a run that the default asks for, by optimizer steps if there are fewer epochs: Algorithm 1 compares five.
_LOSSES = 40


@dataclass(frozen=True)
class LoopLength:
    """How long a training loop goes on, as far as it knows.

    Attributes:
        epochs: epochs of the ledger.
        steps: optimizer steps, if the loop also says when each of them ends.
    """

    epochs: int | None = None
    steps: int | None = None

    def windows(self, every: Amount | None) -> int | None:
        """How often a schedule is asked, the end included; ``None`` if that is not known."""
        if every is None:
            return self.epochs
        return math.ceil(self.steps / every.number) if isinstance(every, Steps) and self.steps else None


@dataclass(frozen=True)
class StagePlan:
    """The levels of a run's stages and the schedule that walks over them.

    Attributes:
        levels: the level of each stage.
        schedule: gives the stage of each epoch (or window) after the first one.
        first: the stage in which the run begins.
        windows: how often the schedule is asked in the run, the end included; ``None`` if that is not known.
        every: how often the schedule is asked; ``None``: after each epoch.
        name: the schedule in words.
    """

    levels: tuple[Level, ...]
    schedule: StageSchedule
    first: int = 0
    windows: int | None = None
    every: Amount | None = None
    name: str = ""

    def __post_init__(self) -> None:
        for name in ("update", "state_dict", "load_state_dict"):
            if not callable(getattr(self.schedule, name, None)):
                raise ConfigError(
                    f"schedule={self.schedule!r} has no method {name}(): give an object such as "
                    "docs/how-to/own-schedule.md shows, or name a schedule in the configuration"
                )

    @property
    def soonest(self) -> int | None:
        """Epochs (or windows) before the last stage at the soonest, if the schedule tells."""
        return getattr(self.schedule, "soonest", None)

    @property
    def too_short(self) -> str | None:
        """The sentence for a run that ends before its last stage can begin; ``None`` if it can, or nobody knows."""
        if self.windows is None or self.soonest is None or self.soonest < self.windows:
            return None
        return (
            f"this run cannot reach its last stage: {self.name} begins stage {len(self.levels)} after {self.soonest} "
            f"{unit_of(self.every)} at the soonest, and the run has {self.windows}. Train for {self.soonest + 1} or "
            "more, write schedule='by-length' (every stage then begins in time), or ask more often with "
            "every=Steps(...)"
        )


def plan_stages(config: FracConfig, levels: tuple[Level, ...], length: LoopLength | None = None) -> StagePlan:
    """The schedule that a configuration names, with the levels of its stages.

    ``auto`` walks over all of them and ``two-stage`` over the first and the last, both by Algorithm 1; ``manual`` gives
    each the same number of epochs, or of windows where ``every`` counts steps or tokens; ``cyclic`` (CPT, arXiv
    2101.09868) repeats half a cosine from the first to the last, rounded to whole bits for precisions; ``fixed`` begins
    each at its turn; ``constant`` holds the last.
    Without a name it is ``auto``, with bounds in which each stage begins if the length of the run is known. A run that
    is too short for all stages leaves some out.

    Args:
        config: names the schedule.
        levels: the levels of the method.
        length: the length of the loop, where that is known; a length in the configuration divides the run.

    Raises:
        ConfigError: a cyclic schedule has less than two epochs a cycle, a manual one less than one a stage, the turns
            do not fit the stages, or the length of the run is needed and not known.
    """
    length = length or LoopLength()
    windows = length.windows(config.schedule.every)
    windows = config.windows if windows is None else windows
    if isinstance(config.schedule, ByLength) and len(levels) > 1:
        return _by_length(config.schedule, levels, length, windows)
    plan = _named(config, levels, length)
    return replace(plan, windows=windows, every=config.schedule.every, name=f"schedule={config.schedule.kind!r}")


def _named(config: FracConfig, levels: tuple[Level, ...], length: LoopLength) -> StagePlan:
    """A schedule over its levels."""
    if len(levels) == 1:
        return StagePlan(levels, EpochSchedule((0,)))
    match config.schedule:
        case Plateau() as plateau:
            levels = (levels[0], levels[-1]) if isinstance(plateau, TwoStage) else levels
            return StagePlan(levels, PlateauSchedule(len(levels), PlateauIndicator(plateau.epsilon, plateau.alpha)))
        case Manual():
            return StagePlan(levels, EpochSchedule(_manual(len(levels), config, length)))
        case Cyclic(cycles=cycles):
            return _cyclic(levels, config, cycles, _windows(config, length))
        case Fixed(turns=turns):
            return StagePlan(levels, EpochSchedule(_fixed(len(levels), config, turns, length)))
        case _:
            return StagePlan(levels[-1:], EpochSchedule((0,)))


def _manual(stages: int, config: FracConfig, length: LoopLength) -> tuple[int, ...]:
    windows = _windows(config, length)
    if windows < stages:
        unit = unit_of(config.schedule.every)
        raise ConfigError(
            f"schedule='manual' gives {stages} stages equal parts of the run, and {windows} {unit} are too few for "
            "that: train longer, take fewer stages, leave schedule out (some stages are then left out), or write "
            "schedule='constant' for the last stage only"
        )
    return tuple(window * stages // windows for window in range(windows))


def _by_length(schedule: ByLength, levels: tuple[Level, ...], length: LoopLength, windows: int | None) -> StagePlan:
    """Algorithm 1, within bounds if the length of the run is known."""
    stages, every = len(levels), schedule.every
    if every is None and length.steps is not None and (windows is None or windows < _LOSSES):
        every = Steps(max(1, length.steps // _LOSSES))
        windows = length.windows(every)
    walk = PlateauSchedule(stages, PlateauIndicator(schedule.epsilon, schedule.alpha), windows)
    name = "Algorithm 1"
    if windows is not None and windows < stages:
        name = f"the length of the run: {windows} {unit_of(every, windows)} for {stages} stages"
    elif windows is not None and walk.latest is not None:
        soonest, latest = (f"{100 * count / windows:.0f}" for count in (walk.soonest, walk.latest))
        bounds = f"between {soonest} and {latest}" if soonest != latest else f"at {latest}"
        name += f", with the last stage begun {bounds} % of the run"
    return StagePlan(levels, walk, first=walk.first, windows=windows, every=every, name=name)


def unit_of(every: Amount | None, count: int = 2) -> str:
    """The unit in which a schedule counts, in words: epochs, or windows of ``every``."""
    plural = "" if count == 1 else "s"
    return f"epoch{plural}" if every is None else f"window{plural} of {every}"


def lacks_length(config: FracConfig, levels: tuple[Level, ...]) -> bool:
    """Whether :func:`plan_stages` would need the length of the run, which the configuration does not say."""
    return config.schedule.divides and len(levels) > 1 and config.windows is None


def _windows(config: FracConfig, length: LoopLength) -> int:
    windows = config.windows or length.windows(config.schedule.every)
    if windows is None:
        every = config.schedule.every
        kind = "epochs" if every is None else f"{type(every).__name__}(...)"
        raise ConfigError(
            f"schedule={config.schedule.kind!r} divides a run into parts: say how long it is with run.length={kind}"
        )
    return windows


def _fixed(stages: int, config: FracConfig, turns: tuple[float | Amount, ...], length: LoopLength) -> tuple[int, ...]:
    """The stage of each window. A stage begins with the first window that begins at its turn or later."""
    if len(turns) != stages - 1:
        raise ConfigError(f"{stages} stages have {stages - 1} turning points, and turns has {len(turns)}")
    every = config.schedule.every
    size = 1 if every is None else every.number
    places = [turn * _windows(config, length) if isinstance(turn, float) else turn.number / size for turn in turns]
    starts = [math.ceil(place - TINY) for place in places]
    windows = config.windows or length.windows(every)
    ends = [0, *starts, *([] if windows is None else [windows])]
    if any(before >= after for before, after in pairwise(ends)):
        window = "an epoch" if every is None else str(every)
        raise ConfigError(
            f"turns=({', '.join(map(str, turns))}) leave a stage without {window}: write turns that are further "
            "apart and before the run's end, or a smaller every"
        )
    return tuple(sum(window >= start for start in starts) for window in range(starts[-1] + 1))


def _cyclic(levels: tuple[Level, ...], config: FracConfig, cycles: int, epochs: int) -> StagePlan:
    unit = unit_of(config.schedule.every)
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
