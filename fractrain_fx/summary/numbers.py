"""Numbers in words of a table: three digits, no exponent, one unit for a column of times."""

from __future__ import annotations

import math
from collections.abc import Iterable

__all__ = ["plain_number", "short_number", "time_unit"]

_TIMES = {"d": 86400.0, "h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3}


def plain_number(value: float) -> str:
    """A number in at least three digits, and without an exponent."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    after = max(2 - math.floor(math.log10(abs(value))), 0)
    return f"{value:.{after}f}"


def short_number(value: float) -> str:
    """A number in three digits and a unit of thousands: ``1.57 M``."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{plain_number(value / size)} {unit}"
    return plain_number(value)


def time_unit(seconds: Iterable[float]) -> tuple[str, float]:
    """The unit for a column of times, and its seconds.

    It is the largest in which the longest time is at least 2, and the shortest at least 0.001.
    """
    times = [time for time in seconds if time > 0]
    longest, shortest = max(times, default=0.0), min(times, default=0.0)
    fits = (unit for unit in _TIMES.items() if longest >= 2 * unit[1] and shortest >= 1e-3 * unit[1])
    return next(fits, ("ms", 1e-3))
