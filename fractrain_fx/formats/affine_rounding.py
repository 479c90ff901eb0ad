"""The affine rounding itself (ALGORITHM 2), in one form for a CPU and one for other devices and compiled graphs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fractrain_fx.formats.bits import highest_level, readable, unrounded
from fractrain_fx.formats.noise import dither
from fractrain_fx.precision import FLOAT_BITS

__all__ = ["SMALLEST_SCALE", "decode_affine", "encode_affine", "modest", "round_affine"]

# Levels lie at least this far apart, so that a constant tensor has a grid too.
SMALLEST_SCALE = 1e-8

# From this width of a range on, differences inside it may overflow.
_WIDE = 1e38

# Up to here level numbers are far from where float32 stops telling whole numbers apart.
_SURE_BITS = 16


def round_affine(
    x: Tensor,
    bits: Tensor,
    lo: Tensor,
    span: Tensor,
    *,
    stochastic: bool = False,
    seed: Tensor | None = None,
    inside: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Round to ``lo + scale * q``, ``q = round(clamp((x - lo) / scale, 0, 2^bits - 1))``, ties to even.

    Args:
        x: values, not empty.
        bits: one width, or one that broadcasts against ``x``; 0 and 32 leave the values as they are.
        lo: low end of the range, of a type at least as wide as that of ``x``; broadcasts against ``x``.
        span: width of the range, likewise.
        stochastic: add noise before rounding.
        seed: of that noise.
        inside: the range was measured on ``x``, so that nothing lies outside and a bad value shows in it.
        out: memory for the result in the type of ``lo``, where ``x`` has that type.

    Returns:
        The rounded values in the type of ``x``; ``x`` itself where nothing is rounded.
    """
    form = _on_a_cpu if readable(x) else _anywhere
    return form(x, bits, lo, span, stochastic, seed, inside, out)


def encode_affine(
    x: Tensor, bits: Tensor, lo: Tensor, span: Tensor, *, inside: bool = False, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What :func:`round_affine` gives at one width of 1 to 8 bits, with the numbers of the levels (uint8) before it."""
    grid = _Grid.of(bits, lo, span, inside) if readable(x) else None
    if grid is None:
        scale = (span / highest_level(bits, lo.dtype)).clamp(min=SMALLEST_SCALE)
        rounded = _anywhere(x, bits, lo, span, False, None, inside, None)
        return ((rounded.to(lo.dtype) - lo) / scale).round().to(torch.uint8), rounded
    work, out = (x, out) if x.dtype == lo.dtype else (copied := x.to(lo.dtype), copied)
    q = grid.levels(work, None, out)
    codes = q.to(torch.uint8)
    q = grid.values(q, out=q)
    if not inside:
        q.add_(x, alpha=0)
    return codes, q.to(x.dtype)


def decode_affine(codes: Tensor, bits: Tensor, lo: Tensor, span: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The values of levels, in the type of ``lo``: those that were rounded to them, bit for bit."""
    grid = _Grid.of(bits, lo, span, True) if readable(codes) else None
    if grid is None:
        return codes.to(lo.dtype) * (span / highest_level(bits, lo.dtype)).clamp(min=SMALLEST_SCALE) + lo
    return grid.values(codes, out=out)


def modest(span: Tensor) -> bool:
    """Whether widths can be seen to be finite and so small that no difference inside them overflows."""
    return readable(span) and _widest(span) < _WIDE


def _widest(span: Tensor) -> float:
    return float(span if span.numel() == 1 else span.amax())


def _anywhere(
    x: Tensor,
    bits: Tensor,
    lo: Tensor,
    span: Tensor,
    stochastic: bool,
    seed: Tensor | None,
    inside: bool,
    out: Tensor | None,
) -> Tensor:
    highest = highest_level(bits, lo.dtype)
    scale = (span / highest).clamp(min=SMALLEST_SCALE)
    q = (x.to(lo.dtype) - lo) / scale
    if stochastic:
        q = q + dither(q, seed)
    q = q.clamp(min=torch.zeros_like(highest), max=highest).round() * scale + lo
    if not inside:
        # The clamp hides an infinite value; 0 * inf is NaN.
        q = q + 0 * x
    return unrounded(bits, x, q.to(x.dtype))


def _on_a_cpu(
    x: Tensor,
    bits: Tensor,
    lo: Tensor,
    span: Tensor,
    stochastic: bool,
    seed: Tensor | None,
    inside: bool,
    out: Tensor | None,
) -> Tensor:
    """The same numbers in passes in place, the small ones by plain arithmetic.

    An op on one number costs as much as one on thousands. Division of two float32 numbers in float64, then rounded to
    float32, is that in float32.
    """
    grid = _Grid.of(bits, lo, span, inside)
    if grid is None:
        return x
    work, out = (x, out) if x.dtype == lo.dtype else (copied := x.to(lo.dtype), copied)
    q = grid.levels(work, dither(work, seed) if stochastic else None, out)
    q = grid.values(q, out=q)
    if not inside:
        q.add_(x, alpha=0)
    q = q if q.dtype == x.dtype else q.to(x.dtype)
    return q if len(grid.tops) == 1 else unrounded(bits, x, q)


@dataclass(frozen=True)
class _Grid:
    """The levels of a rounding on a CPU.

    Attributes:
        lo: the lowest level.
        scale: distance between levels.
        tops: number of the highest level, for each width.
        highest: those as they broadcast against the values.
        start: the lowest level as a number, where it is one.
        sure: nothing lies outside and no level number loses its fraction in float32.
        near: one scale for all, and the lowest level is no further from 0 than the range is wide.
    """

    lo: Tensor
    scale: Tensor
    tops: tuple[float, ...]
    highest: Tensor | float
    start: float | None
    sure: bool
    near: bool

    @classmethod
    def of(cls, bits: Tensor, lo: Tensor, span: Tensor, inside: bool) -> _Grid | None:
        """The grid of some bits in a range; ``None`` where none of them rounds anything."""
        widths = bits.flatten().tolist()
        if all(width in (0, FLOAT_BITS) for width in widths):
            return None
        wide = _widest(span)
        tops = tuple(2.0**width - 1 if width else 1.0 for width in widths)
        highest = tops[0] if len(tops) == 1 else highest_level(bits, lo.dtype)
        sure = inside and wide < _WIDE and all(width <= _SURE_BITS or width == FLOAT_BITS for width in widths)
        if lo.numel() > 1:
            return cls(lo, (span / highest).clamp_(min=SMALLEST_SCALE), tops, highest, None, sure, False)
        scales = [max(wide / top, SMALLEST_SCALE) for top in tops]
        scale = torch.tensor(scales[0] if bits.ndim == 0 else scales, dtype=lo.dtype).view(bits.shape)
        start = float(lo)
        return cls(lo, scale, tops, highest, start, sure, bits.ndim == 0 and sure and abs(start) < wide)

    def levels(self, x: Tensor, noise: Tensor | None, out: Tensor | None) -> Tensor:
        """Number of the nearest level to ``x``, or to ``x`` with noise."""
        if self.start == 0:
            q = torch.div(x, self.scale, out=out)
        elif noise is not None and self.near:
            # In fewer passes: what these round differently is far below the noise.
            q = torch.add(noise, x, alpha=1 / float(self.scale), out=out).sub_(self.lo / self.scale)
            return self._inside(q, noise)
        else:
            q = torch.sub(x, self.lo, out=out).div_(self.scale)
        return self._inside(q if noise is None else q.add_(noise), noise)

    def _inside(self, q: Tensor, noise: Tensor | None) -> Tensor:
        """Whole numbers of the grid, in place; noise is what can lead beyond its ends."""
        if not self.sure or noise is not None:
            if isinstance(self.highest, float):
                q.clamp_(0, self.highest)
            else:
                q.clamp_(min=0).clamp_(max=self.highest)
        return q.round_()

    def values(self, q: Tensor, out: Tensor | None = None) -> Tensor:
        """The values of levels."""
        x = torch.mul(q, self.scale, out=out)
        return x if self.start == 0 else x.add_(self.lo)
