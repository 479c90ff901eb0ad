"""The setting that all parts of the GPU benchmark share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Setting"]


@dataclass(frozen=True)
class Setting:
    """Where and how large the benchmark runs.

    Attributes:
        device: ``cuda``, or ``cpu`` to try the code.
        small: whether models and sizes are tiny, as the tests run them on a CPU.
        rounds: steps measured of each method.
        prepared: called when a model's methods have taken their first steps, before steps are timed.
    """

    device: str
    small: bool
    rounds: int
    prepared: Callable[[], None] = lambda: None
