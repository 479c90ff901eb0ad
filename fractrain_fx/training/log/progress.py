"""The progress of a run, as a checkpoint keeps it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Best", "Progress"]


@dataclass(frozen=True)
class Best:
    """The best evaluation of a run, or none yet.

    Attributes:
        value: the test measure.
        epoch: the epoch before the evaluation, counted from 1.
        macs: training cost until then in full-precision MACs.
    """

    value: float = math.nan
    epoch: int = 0
    macs: float = 0.0


@dataclass
class Progress:
    """The trainer's own state besides model, optimizer and engine.

    Attributes:
        epoch: epochs trained.
        seconds: wall time of training, evaluation included.
        value: the test measure of the last evaluation.
        best: the best evaluation.
    """

    epoch: int = 0
    seconds: float = 0.0
    value: float = math.nan
    best: Best | None = None

    def state_dict(self) -> dict[str, Any]:
        """Plain values (JSON, which has no NaN) of all but the epoch."""
        return {
            "seconds": self.seconds,
            "best": None if self.best is None else dict(vars(self.best)),
            "value": self.value if math.isfinite(self.value) else None,
        }

    @classmethod
    def from_state_dict(cls, epoch: int, state: Mapping[str, Any]) -> Progress:
        """The progress after ``epoch`` epochs, from its ``state_dict``."""
        value = math.nan if state["value"] is None else state["value"]
        best = None if state["best"] is None else Best(**state["best"])
        return cls(epoch, state["seconds"], value, best)
