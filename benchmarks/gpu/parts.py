"""The parts of the GPU benchmark, in order of worth. Each has items, and each item gives rows of one table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu import linears, memory, numerics, skipping, steps, training
from benchmarks.gpu.setting import Setting

__all__ = ["PARTS", "Item", "Part"]

Row = Mapping[str, Any]
Item = Callable[[], Iterable[Row]]


@dataclass(frozen=True)
class Part:
    """A part of the benchmark.

    Attributes:
        title: its heading on the page.
        how: what its rows are.
        worth: its share of the time, against the other parts'.
        items: its items by name, in order of worth, each of which is run by calling it. The rows of a part have the
            same columns: text, numbers, ``Quartiles`` or ``None``.
    """

    title: str
    how: str
    worth: float
    items: Callable[[Setting], Mapping[str, Item]]


PARTS = {
    "numerics": Part("Invariants and numerics", numerics.HOW, 2, numerics.items),
    "steps": Part("A training step", steps.HOW, 5, steps.items),
    "linears": Part("Linear layers on int8 and float8", linears.HOW, 0.8, linears.items),
    "skipping": Part("Skipping", skipping.HOW, 0.8, skipping.items),
    "memory": Part("Memory", memory.HOW, 0.5, memory.items),
    "training": Part("A short training", training.HOW, 0.8, training.items),
}
