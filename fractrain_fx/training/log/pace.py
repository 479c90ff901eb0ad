"""The speed of a run, and the time that it will still take."""

from __future__ import annotations

import time

__all__ = ["Pace"]


class Pace:
    """Counts batches and samples, and the time that training takes without evaluations.

    Args:
        batches: batches that are still to be trained.
    """

    def __init__(self, batches: int) -> None:
        self._batches = batches
        self._started = self._last = time.monotonic()
        self._done = self._samples = 0
        self._seconds = 0.0

    def begin(self) -> None:
        """Leave out the time since the last step."""
        self._last = time.monotonic()

    def step(self, samples: int) -> None:
        """Note a batch of so many samples."""
        now = time.monotonic()
        self._seconds += now - self._last
        self._last = now
        self._samples += samples
        self._done += 1

    def speed(self) -> float:
        """Samples a second since this was last asked."""
        speed = self._samples / self._seconds if self._seconds else 0.0
        self._samples, self._seconds = 0, 0.0
        return speed

    def left(self) -> float:
        """Seconds to the end of the run, if what is left goes as fast as what was done, evaluations included."""
        return (time.monotonic() - self._started) / max(self._done, 1) * (self._batches - self._done)
