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
    if readable(x):
        grid = _Grid.of(bits, lo, span, inside)
        work, out = (x, out) if x.dtype == lo.dtype else (copied := x.to(lo.dtype), copied)
        q = grid.levels(work, None, out)
        codes = q.to(torch.uint8)
        values = grid.values(q, out=q)
    else:
        codes = _levels(x, bits, lo, span).to(torch.uint8)
        values = decode_affine(codes, bits, lo, span)
    return codes, (values if inside else _with_bad_values(values, x)).to(x.dtype)


def decode_affine(codes: Tensor, bits: Tensor, lo: Tensor, span: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The values of levels, in the type of ``lo``: those that were rounded to them, bit for bit."""
    if readable(codes):
        return _Grid.of(bits, lo, span, True).values(codes, out=out)
    return codes.to(lo.dtype) * _scale(bits, lo, span) + lo


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
    q = _levels(x, bits, lo, span, stochastic, seed) * _scale(bits, lo, span) + lo
    return unrounded(bits, x, (q if inside else _with_bad_values(q, x)).to(x.dtype))


def _levels(
    x: Tensor, bits: Tensor, lo: Tensor, span: Tensor, stochastic: bool = False, seed: Tensor | None = None
) -> Tensor:
    q = (x.to(lo.dtype) - lo) / _scale(bits, lo, span)
    if stochastic:
        q = q + dither(q, seed)
    highest = highest_level(bits, lo.dtype)
    return q.clamp(min=torch.zeros_like(highest), max=highest).round()


def _scale(bits: Tensor, lo: Tensor, span: Tensor) -> Tensor:
    return (span / highest_level(bits, lo.dtype)).clamp(min=SMALLEST_SCALE)


def _with_bad_values(rounded: Tensor, x: Tensor) -> Tensor:
    """NaN where ``x`` is infinite, which the clamp hides: 0 * inf is NaN."""
    return rounded.add_(x, alpha=0) if readable(rounded) else rounded + 0 * x


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
    if all(width in (0, FLOAT_BITS) for width in bits.flatten().tolist()):
        return x
    grid = _Grid.of(bits, lo, span, inside)
    work, out = (x, out) if x.dtype == lo.dtype else (copied := x.to(lo.dtype), copied)
    q = grid.levels(work, dither(work, seed) if stochastic else None, out)
    q = grid.values(q, out=q)
    q = (q if inside else _with_bad_values(q, x)).to(x.dtype)
    return q if bits.numel() == 1 else unrounded(bits, x, q)


@dataclass(frozen=True)
class _Grid:
    """The levels of a rounding on a CPU.

    Attributes:
        lo: the lowest level.
        scale: distance between levels.
        highest: number of the highest level.
        start: the lowest level as a number, where it is one.
        sure: nothing lies outside and no level number loses its fraction in float32.
        near: one scale for all, and the lowest level is no further from 0 than the range is wide.
    """

    lo: Tensor
    scale: Tensor
    highest: Tensor | float
    start: float | None
    sure: bool
    near: bool

    @classmethod
    def of(cls, bits: Tensor, lo: Tensor, span: Tensor, inside: bool) -> _Grid:
        """The grid of some bits in a range."""
        widths = bits.flatten().tolist()
        wide = _widest(span)
        tops = [2.0**width - 1 if width else 1.0 for width in widths]
        highest = tops[0] if len(tops) == 1 else highest_level(bits, lo.dtype)
        sure = inside and wide < _WIDE and all(width <= _SURE_BITS or width == FLOAT_BITS for width in widths)
        if lo.numel() > 1:
            return cls(lo, (span / highest).clamp_(min=SMALLEST_SCALE), highest, None, sure, False)
        scales = [max(wide / top, SMALLEST_SCALE) for top in tops]
        scale = torch.tensor(scales[0] if bits.ndim == 0 else scales, dtype=lo.dtype).view(bits.shape)
        start = float(lo)
        return cls(lo, scale, highest, start, sure, bits.ndim == 0 and sure and abs(start) < wide)

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
