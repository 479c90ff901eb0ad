"""The protocol of schedules, and two of them: Algorithm 1, and stages that are fixed beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

from fractrain_fx.config.precision import Precision
from fractrain_fx.engine.indicator import PlateauIndicator

__all__ = ["AutoSchedule", "EpochSchedule", "Level", "StageSchedule"]

Level: TypeAlias = Precision | float


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


class AutoSchedule:
    """Algorithm 1: go to the next stage when the loss has stopped falling, until the last."""

    def __init__(self, stages: int, plateau: PlateauIndicator) -> None:
        self._last = stages - 1
        self._plateau = plateau
        self._stage = 0
        self.soonest = self._last * plateau.window
        """Losses before the last stage at the soonest: a full window of them for each turning point."""

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
        self.soonest = stages.index(stages[-1])
        """Epochs before the last stage."""

    @property
    def first(self) -> int:
        """The stage of the first epoch."""
        return self._stages[0]

    def update(self, loss: float) -> int:
        self._epoch += 1
        return self._stages[min(self._epoch, len(self._stages) - 1)]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._epoch = int(state["epoch"])
