"""Generators of random numbers outside torch: Python's, numpy's, and those that a model holds."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["LEVELS", "Generators", "drawing"]

LEVELS = (2.0**-20, 0.3, 0.5, 0.7, 1 - 2.0**-20)
"""Numbers that :func:`drawing` makes the generators give: nearly the ends of [0, 1), and between."""


class Generators:
    """Python's and numpy's own generators, and those of their kinds among a model's attributes."""

    def __init__(self, model: nn.Module) -> None:
        kinds = (random.Random, np.random.Generator, np.random.RandomState)
        values = [value for module in model.modules() for value in vars(module).values()]
        self.held: tuple[Any, ...] = tuple({id(each): each for each in values if isinstance(each, kinds)}.values())
        self._of_torch = tuple({id(each): each for each in values if isinstance(each, torch.Generator)}.values())

    def states(self) -> list[Any]:
        """The states of all generators, to compare."""
        key = np.random.get_state(legacy=False)
        own = (key["state"]["key"].tobytes(), key["state"]["pos"], key["has_gauss"], key["gauss"])
        return [random.getstate(), own, *(repr(_state(each)) for each in self.held)]

    def keep(self) -> list[Any]:
        """The states of the generators that the model holds, torch's too, to put back."""
        return [*map(_state, self.held), *(each.get_state() for each in self._of_torch)]

    def put_back(self, states: list[Any]) -> None:
        """Set the generators that the model holds to the states from :meth:`keep`."""
        for each, state in zip((*self.held, *self._of_torch), states, strict=True):
            if isinstance(each, torch.Generator):
                each.set_state(state)
            elif isinstance(each, random.Random):
                each.setstate(state)
            elif isinstance(each, np.random.RandomState):
                each.set_state(state)
            else:
                each.bit_generator.state = state


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    return generator.bit_generator.state


@contextlib.contextmanager
def drawing(level: float) -> Iterator[None]:
    """Let Python's and numpy's own generators give ``level`` at the next few hundred draws, then random numbers.

    Both are Mersenne twisters, whose output is an invertible function of one word of their state.
    """
    python, numpy = random.getstate(), np.random.get_state()
    word = _untempered(int(level * 2**32))
    random.setstate((3, (word,) * 624 + (0,), None))
    np.random.set_state(("MT19937", np.full(624, word, np.uint32), 0, 0, 0.0))
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _untempered(y: int) -> int:
    """The word of state from which MT19937 makes the output ``y`` (Matsumoto and Nishimura 1998, their tempering)."""
    y ^= y >> 18
    y ^= (y << 15) & 0xEFC60000
    z = y
    for _ in range(5):
        z = y ^ ((z << 7) & 0x9D2C5680)
    x = z
    for _ in range(3):
        x = z ^ (x >> 11)
    return x & 0xFFFFFFFF
