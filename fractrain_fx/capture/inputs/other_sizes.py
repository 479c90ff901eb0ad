"""The example inputs of a model at other sizes: more or fewer samples, other lengths, other image sizes."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fractrain_fx.capture.inputs.batch import resize_batch
from fractrain_fx.capture.trees import is_strided, map_tensors, tensors_in

__all__ = ["Change", "Length", "dims_of", "lengths", "longer", "shorter"]

# Networks halve images up to five times, so sizes change in steps of 2 ** 5.
_STEP = 32
_LARGE = 64


@dataclass(frozen=True)
class Length:
    """Another size that replaces a size of the example.

    Attributes:
        before: the size in the example.
        after: the other size.
        dim: the only dimension in which it changes; ``None``: every dimension of that size.
    """

    before: int
    after: int
    dim: int | None = None

    def changes(self, dim: int, size: int) -> bool:
        """Whether it changes a dimension that has this size."""
        return size == self.before and self.dim in (None, dim)


@dataclass(frozen=True)
class Change:
    """A change of the example inputs: of the number of samples, of a length, or of both."""

    batch: int | None = None
    length: Length | None = None

    def of(self, inputs: Any, axis: int, *, packed: bool) -> Any:
        """The changed inputs.

        Args:
            inputs: those of the example, in any nesting of containers.
            axis: the dimension that holds the samples.
            packed: whether a sample has several rows.
        """
        if self.length is not None:
            inputs = map_tensors(inputs, lambda x: _resized(x, axis, self.length))
        return inputs if self.batch is None else resize_batch(inputs, self.batch, axis, packed=packed)


def lengths(inputs: Any, axis: int) -> list[int]:
    """Sizes that may be a length or the side of an image, the likeliest first; two at most.

    A size that occurs more often comes first, and among equally frequent ones that of an earlier dimension.
    """
    counted: Counter[int] = Counter()
    for x in filter(is_strided, tensors_in(inputs)):
        counted.update(size for dim, size in enumerate(x.shape) if dim != axis and size > 1)
    # Sorting is stable: equally frequent sizes keep the order in which they were found.
    return sorted(counted, key=lambda size: -counted[size])[:2]


def dims_of(inputs: Any, axis: int, size: int) -> list[int]:
    """The dimensions in which any of the inputs has this size."""
    plain = filter(is_strided, tensors_in(inputs))
    return sorted({dim for x in plain for dim, each in enumerate(x.shape) if dim != axis and each == size})


def shorter(size: int) -> int:
    """Half of a small size. Three quarters of a large size, in whole steps, because its square may set the cost."""
    return size // 2 if size < _LARGE else size - _step(size)


def longer(size: int) -> int:
    """Twice a small size. Five quarters of a large size, in whole steps, because its square may set the cost."""
    return size * 2 if size < _LARGE else size + _step(size)


def _step(size: int) -> int:
    unit = math.gcd(size, _STEP)
    return max(round(size / 4 / unit), 1) * unit


def _resized(x: Tensor, axis: int, length: Length | None) -> Tensor:
    for dim in range(x.ndim) if is_strided(x) else ():
        if length is not None and dim != axis and length.changes(dim, x.shape[dim]):
            index = torch.arange(length.after, device=x.device) % length.before
            x = x.detach().index_select(dim, index).requires_grad_(x.requires_grad)
    return x
