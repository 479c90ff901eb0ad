"""The example inputs of a model at other sizes: more or fewer samples, other lengths, other image sizes."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fractrain_fx.capture.inputs.batch import resize_batch

__all__ = ["Change", "Length", "dims_of", "lengths", "longer", "shorter"]

# Networks halve images up to five times, and say so themselves where that does not come out even.
_STEP = 32
_LARGE = 64


@dataclass(frozen=True)
class Length:
    """Another size in the place of one of the example's.

    Attributes:
        before: the example's.
        after: the other one.
        dim: the only dimension in which it changes; ``None``: wherever that size stands.
    """

    before: int
    after: int
    dim: int | None = None

    def changes(self, dim: int, size: int) -> bool:
        """Whether it changes a dimension that has this size."""
        return size == self.before and self.dim in (None, dim)


@dataclass(frozen=True)
class Change:
    """How inputs differ from the example: in the number of samples, in a length, or in both."""

    batch: int | None = None
    length: Length | None = None

    def of(self, inputs: Any, axis: int, *, packed: bool) -> Any:
        """The inputs so changed.

        Args:
            inputs: the example's, in any nesting of containers.
            axis: the dimension that holds the samples.
            packed: whether a sample has several rows.
        """
        if self.length is not None:
            inputs = pytree.tree_map_only(Tensor, lambda x: _resized(x, axis, self.length), inputs)
        return inputs if self.batch is None else resize_batch(inputs, self.batch, axis, packed=packed)


def lengths(inputs: Any, axis: int) -> list[int]:
    """Sizes that may stand for a length or for the sides of an image, the likeliest first; two at most.

    A size that several inputs share, or one input twice, comes before others, and an earlier dimension before a later.
    """
    counted: Counter[int] = Counter()
    for x in pytree.tree_leaves(inputs):
        if isinstance(x, Tensor):
            counted.update(size for dim, size in enumerate(x.shape) if dim != axis and size > 1)
    # Sorting keeps the order in which sizes were met where they are met as often.
    return sorted(counted, key=lambda size: -counted[size])[:2]


def dims_of(inputs: Any, axis: int, size: int) -> list[int]:
    """The dimensions in which any of the inputs has this size."""
    tensors = (x for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor))
    return sorted({dim for x in tensors for dim, each in enumerate(x.shape) if dim != axis and each == size})


def shorter(size: int) -> int:
    """Half of a small size; of a large one, whose square may count, three quarters in whole steps."""
    return size // 2 if size < _LARGE else size - _step(size)


def longer(size: int) -> int:
    """Twice a small size; of a large one, whose square may count, five quarters in whole steps."""
    return size * 2 if size < _LARGE else size + _step(size)


def _step(size: int) -> int:
    unit = math.gcd(size, _STEP)
    return max(round(size / 4 / unit), 1) * unit


def _resized(x: Tensor, axis: int, length: Length | None) -> Tensor:
    for dim in range(x.ndim):
        if length is not None and dim != axis and length.changes(dim, x.shape[dim]):
            index = torch.arange(length.after, device=x.device) % length.before
            x = x.detach().index_select(dim, index).requires_grad_(x.requires_grad)
    return x
