"""The DoReFa-Net format: every tensor is brought into 0..1 and rounded there (arXiv 1606.06160; ALGORITHM 2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fractrain_fx.formats.base import SampleAxis
from fractrain_fx.formats.bits import as_bits, highest_level, is_rounded, unrounded, work_dtype
from fractrain_fx.formats.noise import add_dither

__all__ = ["DoReFaFormat"]


class DoReFaFormat:
    """Activations clipped to 0..1, weights through tanh to -1..1, gradients scaled and dithered sample by sample.

    Clip and tanh have their own derivatives; only the rounding between them passes gradients straight through.
    """

    name = "dorefa"

    def activation_range(self, x: Float[Tensor, "*dims"]) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Always 0..1: this format measures nothing."""
        return torch.zeros((), device=x.device), torch.ones((), device=x.device)

    def activation(
        self,
        x: Float[Tensor, "*dims"],
        bits: int | Int[Tensor, "*bits"],
        *,
        lo: Float[Tensor, ""],
        span: Float[Tensor, ""],
    ) -> Float[Tensor, "*dims"]:
        """``Q(clip(x, 0, 1))``; the range is fixed, so ``lo`` and ``span`` are not read."""
        bits = as_bits(bits, x)
        unit = x.to(work_dtype(x)).clamp(0, 1)
        return _finish(bits, x, _RoundUnit.apply(unit, bits))

    def activation_errors(
        self, x: Float[Tensor, "*dims"], bits: Sequence[int], *, lo: Float[Tensor, ""], span: Float[Tensor, ""]
    ) -> Iterator[Float[Tensor, "*dims"]]:
        for each in bits:
            yield self.activation(x, each, lo=lo, span=span).to(work_dtype(x)) - x.to(work_dtype(x))

    def weight(
        self, w: Float[Tensor, "*dims"], bits: int | Int[Tensor, "*bits"], *, dim: int
    ) -> Float[Tensor, "*dims"]:
        """``2 Q(tanh w / (2 max |tanh w|) + 1/2) - 1``, the maximum over the whole weight."""
        if w.numel() == 0:
            return w
        bits = as_bits(bits, w)
        squashed = w.to(work_dtype(w)).tanh()
        unit = squashed / (2 * _or_one(squashed.abs().amax())) + 0.5
        return _finish(bits, w, 2 * _RoundUnit.apply(unit, bits) - 1)

    def gradient(
        self, g: Float[Tensor, "*dims"], bits: int | Int[Tensor, "*bits"], *, axis: SampleAxis
    ) -> Float[Tensor, "*dims"]:
        """``2 m (Q(g / (2 m) + 1/2 + n) - 1/2)``, ``m`` a sample's largest |g|, ``n`` noise of one level."""
        if g.numel() == 0:
            return g
        bits = as_bits(bits, g)
        dtype = work_dtype(g)
        highest = highest_level(bits, dtype)
        largest = axis.expand(axis.samples_first(g.abs()).amax(1).to(dtype), g.ndim)
        # g / m before the halving: 2 m may overflow.
        q = (g.to(dtype) / _or_one(largest)).mul_(0.5).add_(0.5).mul_(highest)
        add_dither(q).clamp_(min=0).clamp_(max=highest).round_()
        return unrounded(bits, g, q.div_(highest).sub_(0.5).mul_(2).mul_(largest).to(g.dtype))


class _RoundUnit(torch.autograd.Function):
    """``Q``: values in 0..1 to the nearest of ``2^bits`` levels, with the identity as gradient."""

    @staticmethod
    def forward(ctx: Any, unit: Tensor, bits: Tensor) -> Tensor:
        highest = highest_level(bits, unit.dtype)
        return (unit * highest).round_().div_(highest)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


def _or_one(largest: Tensor) -> Tensor:
    return torch.where(largest == 0, 1, largest)


def _finish(bits: Tensor, x: Tensor, rounded: Tensor) -> Tensor:
    """``rounded`` where ``bits`` asks for it, NaN there for an infinite ``x``, which clip and tanh hide."""
    return torch.where(is_rounded(bits), (rounded + 0 * x.detach()).to(x.dtype), x)
