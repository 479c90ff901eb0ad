"""The protocol of schedules, Algorithm 1 with and without bounds, and stages that are fixed beforehand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

from fractrain_fx.config.precision import Precision
from fractrain_fx.engine.indicator import PlateauIndicator

__all__ = ["TINY", "EpochSchedule", "Level", "PlateauSchedule", "StageSchedule"]

Level: TypeAlias = Precision | float

TINY = 1e-9  # shares such as 0.1 of 10 windows are not exact in binary

_EARLIEST = 0.4
"""The share of a run before which a :class:`PlateauSchedule` that knows the length does not begin the last stage."""


@runtime_checkable
class StageSchedule(Protocol):
    """Anything that maps the losses seen so far to a stage.

    A schedule may also have ``soonest``: the number of losses after which it can begin the last stage at the soonest.
    The engine then says beforehand if a run is too short for that.
    """

    def update(self, loss: float) -> int:
        """Take the mean task loss of the epoch (or window) that ended; return the stage of the next one (from 0)."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Plain values that continue this schedule elsewhere."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` gave."""
        ...


class PlateauSchedule:
    """Algorithm 1: go to the next stage when the loss has stopped falling, until the last.

    If the length of the run is known, no stage begins too early or too late for it. Of ``n`` stages, stage ``k`` (from
    0) begins between the shares ``0.4 k / (n - 1)`` and ``k / n`` of the run: when the loss has stopped falling, else
    where equal parts would begin it. A run that is too short for all stages leaves out some between the first and the
    last, and one of a single loss all but the last.

    Args:
        stages: the number of stages.
        plateau: tells whether the loss has stopped falling. A stage that begins late leaves its threshold as it was.
        windows: losses of the whole run; ``None`` if that is not known: nothing then bounds when a stage begins.

    Attributes:
        first: the stage in which the run begins.
        soonest: losses before the last stage, at the least.
        latest: losses before the last stage, at the most; ``None`` if nothing bounds when it begins.
    """

    def __init__(self, stages: int, plateau: PlateauIndicator, windows: int | None = None) -> None:
        self._last = stages - 1
        self._plateau = plateau
        self._windows = windows
        self._seen = 0
        self._flat = False
        self.first = self._stage = self._due(0)
        self.soonest, self.latest = 0, None if windows is None else 0
        for following in range(1, stages):
            full = self.soonest + plateau.window  # a turning point needs a full window of losses
            self.soonest = max(self._earliest(following), full)
            if windows is not None:
                self.latest = next(count for count in range(windows) if self._due(count) >= following)
                self.soonest = min(self.soonest, self.latest)

    def _earliest(self, stage: int) -> int:
        """The losses before a stage, at the least."""
        if self._windows is None:
            return 0
        return math.ceil(_EARLIEST * stage / self._last * self._windows - TINY)

    def _due(self, count: int) -> int:
        """The stage that has begun after so many losses, at the latest."""
        if self._windows is None:
            return 0
        if self._windows > self._last:
            return min(self._last, ((count + 1) * (self._last + 1) - 1) // self._windows)
        return self._last if count >= self._windows - 1 else round(count * self._last / (self._windows - 1))

    def update(self, loss: float) -> int:
        self._seen += 1
        if self._stage == self._last:
            return self._stage
        self._flat = self._flat or self._plateau.update(loss)
        rises = self._flat and self._seen >= self._earliest(self._stage + 1)
        stage = max(self._stage + rises, self._due(self._seen))
        if stage > self._stage:
            self._stage, self._flat = stage, False
            self._plateau.restart()
        return self._stage

    def state_dict(self) -> dict[str, Any]:
        # Without bounds the place in the run does not count. Its absence tells such a state from one with bounds.
        place = {} if self._windows is None else {"seen": self._seen, "flat": self._flat}
        return {"stage": self._stage, "plateau": self._plateau.state_dict()} | place

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._plateau.load_state_dict(state["plateau"])
        self._stage = int(state["stage"])
        if self._windows is not None:
            self._seen, self._flat = int(state["seen"]), bool(state["flat"])


class EpochSchedule:
    """A stage for each epoch (or window), fixed beforehand; after the last one its stage holds."""

    def __init__(self, stages: tuple[int, ...]) -> None:
        self._stages = stages
        self._epoch = 0
        self.soonest = stages.index(stages[-1])
        """Epochs before the last stage."""

    def update(self, loss: float) -> int:
        self._epoch += 1
        return self._stages[min(self._epoch, len(self._stages) - 1)]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._epoch = int(state["epoch"])
