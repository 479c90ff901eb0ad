"""The DoReFa-Net format: every tensor is brought into 0..1 and rounded there (arXiv 1606.06160)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Int
from torch import Tensor

from fractrain_fx.formats.base import Bits, Format, Operand, Reach, Seed, ValueRange, Values
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.formats.bits import as_bits, highest_level, is_rounded, unrounded, work_dtype
from fractrain_fx.formats.noise import dither

__all__ = ["DoReFaFormat"]


class DoReFaFormat(Format):
    """Activations clipped to 0..1, weights through tanh to -1..1, gradients scaled and dithered sample by sample.

    Clip and tanh have their own derivatives; only the rounding between them passes gradients straight through.
    """

    name = "dorefa"

    def reach(self, x: Values, bits: Int[Tensor, "*bits"], of: Operand, within: ValueRange | None) -> Reach:
        """Activations are clipped to 0..1; levels of weights and gradients reach to their largest value."""
        if of.tensor == "g" or of.weight:
            return Reach()
        rounds, half = is_rounded(bits), 0.5 / highest_level(bits, work_dtype(x))
        low, high = (torch.where(rounds, end, math.copysign(torch.inf, end - 0.5)) for end in (0.0, 1.0))
        return Reach((low, high), (torch.zeros_like(half), torch.where(rounds, half, torch.nan)))

    def activation_range(self, x: Values) -> ValueRange:
        """Always 0..1: this format measures nothing."""
        return ValueRange(torch.zeros((), device=x.device), torch.ones((), device=x.device))

    def activation(self, x: Values, bits: Bits, within: ValueRange, *, out: Tensor | None = None) -> Values:
        """``Q(clip(x, 0, 1))``; the range is fixed, so ``within`` is not read."""
        bits = as_bits(bits, x)
        return _finish(bits, x, _round_unit(x.to(work_dtype(x)).clamp(0, 1), bits))

    def activation_gradient(self, x: Values, g: Values, bits: Bits) -> Values:
        """The gradient of the clip: 0 where ``x`` was clipped."""
        clipped = ((x < 0) | (x > 1)) & is_rounded(as_bits(bits, x))
        return g.masked_fill(clipped, 0)

    def weight_range(self, w: Values, *, dim: int | None) -> ValueRange:
        """0 and the largest ``|tanh w|`` of the whole weight (1 if that is 0)."""
        largest = w.to(work_dtype(w)).tanh().abs().amax() if w.numel() else w.new_ones((), dtype=work_dtype(w))
        return ValueRange(torch.zeros_like(largest), _or_one(largest))

    def weight(
        self, w: Values, bits: Bits, *, dim: int | None, within: ValueRange | None = None, out: Tensor | None = None
    ) -> Values:
        """``2 Q(tanh w / (2 max |tanh w|) + 1/2) - 1``, with the maximum over the whole weight."""
        if w.numel() == 0:
            return w
        bits = as_bits(bits, w)
        largest = (within or self.weight_range(w, dim=dim)).span
        unit = w.to(work_dtype(w)).tanh() / (2 * largest) + 0.5
        return _finish(bits, w, 2 * _round_unit(unit, bits) - 1)

    def weight_gradient(self, w: Values, g: Values, bits: Bits) -> Values:
        """The gradient of ``tanh w / max |tanh w|``; the values that attain the maximum share its gradient."""
        squashed = w.to(work_dtype(w)).tanh()
        size = squashed.abs()
        largest = size.amax() if w.numel() else size.new_ones(())
        attained = (size == largest).to(size.dtype)
        upstream = g.to(size.dtype)
        of_largest = (upstream * squashed).sum() / _or_one(largest)
        inner = upstream - squashed.sign() * attained * of_largest / attained.sum().clamp(min=1)
        through = (inner / _or_one(largest) * (1 - squashed.square())).to(g.dtype)
        return torch.where(is_rounded(as_bits(bits, w)), through, g)

    def gradient(
        self, g: Values, bits: Bits, *, axis: BatchAxis, seed: Seed = None, out: Tensor | None = None
    ) -> Values:
        """``2 m (Q(g / (2 m) + 1/2 + n) - 1/2)``; ``m`` is the sample's largest |g|, ``n`` noise of one level."""
        if g.numel() == 0:
            return g
        bits = as_bits(bits, g)
        dtype = work_dtype(g)
        highest = highest_level(bits, dtype)
        largest = axis.expand(axis.samples_first(g.abs()).amax(1).to(dtype), g.shape)
        # Divided by m first, then halved: 2 m may overflow.
        q = (g.to(dtype) / _or_one(largest)).mul_(0.5).add_(0.5).mul_(highest)
        q.add_(dither(q, seed)).clamp_(min=0).clamp_(max=highest).round_()
        return unrounded(bits, g, q.div_(highest).sub_(0.5).mul_(2).mul_(largest).to(g.dtype))


def _round_unit(unit: Tensor, bits: Tensor) -> Tensor:
    """``Q``: values in 0..1 to the nearest of ``2^bits`` levels."""
    highest = highest_level(bits, unit.dtype)
    return (unit * highest).round_().div_(highest)


def _or_one(largest: Tensor) -> Tensor:
    return torch.where(largest == 0, 1, largest)


def _finish(bits: Tensor, x: Tensor, rounded: Tensor) -> Tensor:
    """``rounded`` where ``bits`` round, else ``x``; an infinite ``x``, which clip and tanh hide, is rounded to NaN."""
    return torch.where(is_rounded(bits), (rounded + 0 * x).to(x.dtype), x)
