"""The levels of an affine rounding on a CPU. Their numbers are read once, so that a rounding is a few passes in place.

A tensor op on one number takes as long as one on thousands, so single numbers are computed in Python.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fractrain_fx.config.precision import FLOAT_BITS
from fractrain_fx.formats.affine.scale import scale_number, scales
from fractrain_fx.formats.base import ValueRange
from fractrain_fx.formats.bits import highest_level, readable

__all__ = ["Grid", "modest"]

# From this width on, differences of values in a range may overflow.
_WIDE = 1e38

# With at most this many bits, level numbers are far below 2^24, from which on float32 cannot hold every whole number.
_SURE_BITS = 16


def modest(span: Tensor) -> bool:
    """Whether the host can read the widths of ranges, and no difference of values in such a range overflows."""
    return readable(span) and _widest(span) < _WIDE


class Grid:
    """The levels ``lo + scale * q`` of some bits in a range, on a CPU.

    Args:
        bits: one width, or widths that broadcast against the values; they are not all 0 or 32.
        within: the range, one for all values or one for each channel.

    Attributes:
        lo: the lowest level.
        start: ``lo`` as a number, if there is one range.
        scale: distance between levels.
        step: ``scale`` as a number, if there is one range and one width.
        highest: number of the highest level.
        sure: no value lies outside the range, and float32 holds the fraction of every value's level number.
        near: the lowest level is no further from 0 than the range is wide, so that the roundings of
            ``x / scale - lo / scale`` stay far below a level.
    """

    __slots__ = ("highest", "lo", "near", "scale", "start", "step", "sure")

    def __init__(self, bits: Tensor, within: ValueRange) -> None:
        lo, span, measured_here = within
        self.lo = lo
        self.start: float | None = None
        self.step: float | None = None
        self.highest: Tensor | float
        self.scale: Tensor
        wide = _widest(span)
        widths = bits.flatten().tolist()
        one = widths[0] if len(set(widths)) == 1 else None
        self.sure = (
            measured_here and wide < _WIDE and all(width <= _SURE_BITS or width == FLOAT_BITS for width in widths)
        )
        self.near = False
        if lo.numel() == 1:
            self.start = float(lo)
        self.highest = highest_level(bits, lo.dtype) if one is None else 2.0**one - 1
        if self.start is None:
            self.scale = scales(span, bits if one is None else one)
        elif one is None:
            self.scale = lo.new_tensor([scale_number(wide, width) for width in widths]).view(bits.shape)
        else:
            self.step = scale_number(wide, one)
            self.scale = torch.full_like(span, self.step)
            self.near = self.sure and abs(self.start) < wide

    def round(self, x: Tensor, noise: Tensor | None, out: Tensor | None) -> Tensor:
        """The level nearest to each value, or to each value with noise."""
        q = self.levels(x, noise, out)
        return self.values(q, out=q)

    def levels(self, x: Tensor, noise: Tensor | None, out: Tensor | None) -> Tensor:
        """Number of the nearest level to ``x``, or to ``x`` with noise."""
        if noise is not None:
            return self._on_grid(self._with_noise(x, noise, out))
        q = self._places(x, out)
        return q.round_() if self.sure else self._on_grid(q)

    def _places(self, x: Tensor, out: Tensor | None) -> Tensor:
        """How far each value lies above the lowest level, in distances between levels."""
        return torch.div(x, self.scale, out=out) if self.start == 0 else torch.sub(x, self.lo, out=out).div_(self.scale)

    def _with_noise(self, x: Tensor, noise: Tensor, out: Tensor | None) -> Tensor:
        if self.near and self.step is not None:
            # Fewer passes than for the nearest level: their roundings differ by far less than the noise.
            q = torch.add(noise, x, alpha=1 / self.step, out=out)
            return q.sub_(self.lo / self.scale) if self.start else q
        return self._places(x, out).add_(noise)

    def _on_grid(self, q: Tensor) -> Tensor:
        """Clamp to the grid and round to whole numbers, in place."""
        if isinstance(self.highest, float):
            q.clamp_(0, self.highest)
        else:
            q.clamp_(min=0).clamp_(max=self.highest)
        return q.round_()

    def values(self, q: Tensor, out: Tensor | None = None) -> Tensor:
        """The values of the levels with numbers ``q``."""
        x = torch.mul(q, self.scale, out=out)
        return x if self.start == 0 else x.add_(self.lo)


def _widest(span: Tensor) -> float:
    return float(span if span.numel() == 1 else span.amax())
