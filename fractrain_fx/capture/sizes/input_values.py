"""Inputs that hold sizes, such as the grids of images (``image_grid_thw``), whose values decide what a model does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fractrain_fx.capture.sizes.guards import Place

__all__ = ["InputValues", "holds_sizes", "size_inputs"]

# A grid has two or three sizes, a box four numbers.
_NUMBERS = range(2, 5)


def holds_sizes(value: Any) -> bool:
    """Whether an input looks like a list of sizes: integers of shape ``[items, 2 to 4]``."""
    if not isinstance(value, Tensor) or value.ndim != 2 or value.shape[1] not in _NUMBERS:
        return False
    return not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)


def size_inputs(tensors: Mapping[str, Any]) -> frozenset[str]:
    """Names of the inputs that hold sizes."""
    return frozenset(name for name, value in tensors.items() if holds_sizes(value))


@dataclass(frozen=True, eq=False)
class InputValues:
    """A condition on an input: it has the values that it had when the graph was recorded.

    Attributes:
        name: the input.
        index: its place among the inputs of the graph.
        value: its recorded values.
        place: the line that read them.
        module: the path of the module whose code read them.
    """

    name: str
    index: int
    value: Tensor
    place: Place
    module: str = ""

    def holds(self, given: Any) -> bool:
        """Whether a call's input has the recorded values."""
        return isinstance(given, Tensor) and not given.is_meta and torch.equal(given, self.value.to(given.device))

    def __str__(self) -> str:
        values = self.value.tolist()
        shown = values if len(values) <= 3 else [*values[:3], ...]
        return f"{self.name} == {str(shown).replace('Ellipsis', '...')}"
