"""How far numbers of a GPU may lie from those that they are compared with."""

from __future__ import annotations

from torch import Tensor

__all__ = ["below", "distance"]


def distance(x: Tensor, y: Tensor) -> float:
    """The distance of ``x`` from ``y``, relative to the size of ``y``."""
    return float((x - y).norm() / (y.norm() + 1e-12))


def below(value: float, limit: float) -> float:
    """``value``.

    Raises:
        AssertionError: it is above ``limit``, or NaN.
    """
    if not value <= limit:
        raise AssertionError(f"{value:.3g} is above {limit:.3g}")
    return value
