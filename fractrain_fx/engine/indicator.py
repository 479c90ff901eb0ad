"""Algorithm 1's indicator: has the training loss stopped falling?"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from fractrain_fx.errors import ConfigError

__all__ = ["PlateauIndicator"]

# The early epochs give the magnitude of the loss, so that one threshold fits different tasks.
_SCALE_EPOCHS = 10


class PlateauIndicator:
    """Watches epoch losses and fires at a turning point (paper, Algorithm 1).

    It fires when every loss of a full window lies within ``epsilon`` of the newest one, measured in units of
    ``scale``; then ``epsilon`` shrinks by ``alpha`` and the window starts empty.

    Args:
        epsilon: threshold on the difference of two losses, in units of ``scale``.
        alpha: factor that ``epsilon`` takes at each firing.
        window: epoch losses compared, the newest included.

    Raises:
        ConfigError: ``epsilon`` is negative, ``alpha`` is outside 0..1, or the window holds fewer than 2 losses.
    """

    def __init__(self, epsilon: float = 0.05, alpha: float = 0.3, window: int = 5) -> None:
        if not (epsilon >= 0 and 0 <= alpha <= 1 and window >= 2):
            raise ConfigError(
                f"a plateau needs epsilon >= 0, alpha in 0..1 and a window of 2 or more; "
                f"got epsilon={epsilon}, alpha={alpha}, window={window}"
            )
        self.epsilon = epsilon
        self.alpha = alpha
        self._window: deque[float] = deque(maxlen=window)
        self._first: list[float] = []

    @property
    def window(self) -> int:
        """Losses compared at a turning point."""
        return self._window.maxlen or 0

    @property
    def scale(self) -> float:
        """Mean of the first ten epoch losses, or of as many as there are; NaN before the first."""
        return sum(self._first) / len(self._first) if self._first else math.nan

    def update(self, epoch_loss: float) -> bool:
        """Take the mean task loss of an epoch; returns whether this epoch is a turning point.

        A loss that is not finite is ignored.
        """
        loss = float(epoch_loss)
        if not math.isfinite(loss):
            return False
        if len(self._first) < _SCALE_EPOCHS:
            self._first.append(loss)
        self._window.append(loss)
        if len(self._window) < self.window or not self._flat():
            return False
        self.epsilon *= self.alpha
        self.restart()
        return True

    def restart(self) -> None:
        """Empty the window: a stage has begun, and losses before it do not count."""
        self._window.clear()

    def _flat(self) -> bool:
        *earlier, last = self._window
        scale = abs(self.scale)  # the loss may be negative: a log-density can exceed 0
        if scale == 0:
            return all(loss == last for loss in earlier)
        return all(abs(loss - last) / scale <= self.epsilon for loss in earlier)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers that continue this indicator elsewhere."""
        return {"epsilon": self.epsilon, "window": list(self._window), "first": list(self._first)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` gave."""
        self.epsilon = float(state["epsilon"])
        self._window = deque(state["window"], maxlen=self._window.maxlen)
        self._first = list(state["first"])
