"""The levels of the affine grid: the distance between them, the nearest one to a value, and the value of each.

The distance follows from the range and the bits alone, because ``export`` writes scales without a format at hand: other
scales need other ranges. Whoever changes it changes ``scale_of`` in native/csrc/grid.h and ``_scale`` in
kernels/triton/kernels.py too, which compute it inside their loops.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fractrain_fx.formats.base import ValueRange
from fractrain_fx.formats.bits import highest_level, once, readable

__all__ = ["SMALLEST_SCALE", "AffineLevels", "levels_of"]

SMALLEST_SCALE = 1e-8
"""Levels lie at least this far apart, so that a constant tensor has a grid too."""


class AffineLevels(NamedTuple):
    """The levels ``lo + scale * q``, ``q`` from 0 to ``highest``. All tensors broadcast against the values.

    Attributes:
        within: the range.
        scale: distance between levels, ``max(span / (2^bits - 1), 1e-8)``.
        highest: number of the highest level, ``2^bits - 1``.
    """

    within: ValueRange
    scale: Float[Tensor, "*scales"]
    highest: Float[Tensor, "*bits"]

    @property
    def lo(self) -> Float[Tensor, "*ends"]:
        """The lowest level."""
        return self.within.lo

    @property
    def zero(self) -> Float[Tensor, "*scales"]:
        """How far 0 lies above the lowest level, in distances between levels."""
        return -self.lo / self.scale

    @property
    def zero_level(self) -> Float[Tensor, "*scales"]:
        """The number of the level nearest to 0."""
        return self.zero.round().clamp(min=0).minimum(self.highest)

    def places(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """How far each value lies above the lowest level, in distances between levels."""
        return torch.div(x, self.scale, out=out) if self._from_0() else torch.sub(x, self.lo, out=out).div_(self.scale)

    def nearest(self, x: Tensor, noise: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """The number of the level nearest to each value, or to each value with noise; ties go to the even one."""
        places = self.places(x, out)
        return self.on_grid(places if noise is None else places.add_(noise))

    def on_grid(self, places: Tensor) -> Tensor:
        """The numbers of the levels nearest to some places, in place."""
        # In a range measured on the values, noise moves them at most half a level below the lowest one.
        return (places if self.within.measured_here else places.clamp_(min=0)).clamp_(max=self.highest).round_()

    def values(self, q: Tensor) -> Tensor:
        """The values of the levels ``q``, which are written into."""
        q = q.mul_(self.scale)
        return q if self._from_0() else q.add_(self.lo)

    def _from_0(self) -> bool:
        """Whether the lowest level is known to be 0, as behind a ReLU, which saves two passes over the values."""
        return self.lo.ndim == 0 and readable(self.lo) and float(self.lo) == 0


def levels_of(within: ValueRange, bits: int | Int[Tensor, "*bits"]) -> AffineLevels:
    """The levels of some bits in a range; ``bits`` broadcast against its ends.

    It divides by a tensor, because a GPU multiplies by the inverse of a Python number: values midway between two levels
    would then go to the other one.
    """
    span = within.span
    highest = span.new_full((), 2.0**bits - 1) if isinstance(bits, int) else highest_level(bits, span.dtype)
    return AffineLevels(within, once((span / highest).clamp(min=SMALLEST_SCALE)), once(highest))
