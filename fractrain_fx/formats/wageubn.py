"""The WAGEUBN format: fixed-point numbers, of which gradients are scaled by powers of two (arXiv 1909.02384).

Its name lists what is quantized. W and A, weights and activations, are quantized *directly*: rounded to a fixed grid.
E, the error at an op's output, is quantized by *shift*: scaled by a power of two first. G, the gradient of a weight, is
quantized by a *constant*: scaled to one size, whatever its own. U, the update, has 24 bits in that publication; the
master weights of this package are float32, whose significand has as many. BN stays float (paper 4.1).
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from fractrain_fx.formats.base import Bits, Format, Operand, Reach, Seed, ValueRange, Values
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.formats.bits import as_bits, is_rounded, unrounded, work_dtype
from fractrain_fx.formats.noise import dither

__all__ = ["WageubnFormat"]

# Constant quantization of a weight's gradient: integers below 2^7 in size (8 bits), in units of 2^-14 (k_GC = 15).
_GRADIENT_LEVELS = 2.0**7
_GRADIENT_UNIT = 2.0**-14

# Exponents of the powers of two that scale a tensor, which are normal float32 numbers even when divided by 2^31.
_SMALLEST_EXPONENT, _LARGEST_EXPONENT = -95, 127


class WageubnFormat(Format):
    """Activations and weights on a grid of step ``2^(1 - bits)``, gradients on a grid that a power of two scales.

    Weights saturate at one step below 1. Activations do not saturate, as published: the grid is fixed, and values
    above 1 keep their integer part, which the number of bits does not count. Errors below the first step have a
    second grid that is ``2^(bits - 1)`` times finer, marked by a flag bit that is not counted either.
    """

    name = "wageubn"

    def reach(self, x: Values, bits: Int[Tensor, "*bits"], of: Operand, within: ValueRange | None) -> Reach:
        """Weights are clipped to one step below 1, errors to the largest level; activations are not clipped."""
        steps = _steps_to_one(bits, work_dtype(x))
        largest = torch.full_like(steps, torch.inf)
        if of.tensor == "g" and x.numel():
            largest = (steps - 1) * _power_of_two_near(x) / steps
        elif of.weight:
            largest = 1 - 1 / steps
        largest = torch.where(is_rounded(bits), largest, torch.inf)
        return Reach((-largest, largest))

    def activation_range(self, x: Values) -> ValueRange:
        """Always -1..1, the grid's own unit: this format measures nothing."""
        return ValueRange(torch.full((), -1.0, device=x.device), torch.full((), 2.0, device=x.device))

    def activation(self, x: Values, bits: Bits, within: ValueRange, *, out: Tensor | None = None) -> Values:
        """``round(x 2^(bits - 1)) / 2^(bits - 1)``; the grid is fixed, so ``within`` is not read."""
        return _direct(x, as_bits(bits, x))

    def weight_range(self, w: Values, *, dim: int | None) -> ValueRange:
        """Always -1..1: this format measures nothing."""
        return self.activation_range(w)

    def weight(
        self, w: Values, bits: Bits, *, dim: int | None, within: ValueRange | None = None, out: Tensor | None = None
    ) -> Values:
        """Direct quantization, clipped to one step below 1."""
        bits = as_bits(bits, w)
        return _direct(w, bits, 1 - 1 / _steps_to_one(bits, work_dtype(w)))

    def weight_gradient(self, w: Values, g: Values, bits: Bits) -> Values:
        """Constant quantization, if the weight is rounded."""
        return torch.where(is_rounded(as_bits(bits, w)), _constant(g), g)

    def gradient(
        self, g: Values, bits: Bits, *, axis: BatchAxis, seed: Seed = None, out: Tensor | None = None
    ) -> Values:
        """Shift quantization with a flag (the paper's Q_E2), scaled by the largest value of the whole tensor."""
        if g.numel() == 0:
            return g
        bits = as_bits(bits, g)
        steps = _steps_to_one(bits, work_dtype(g))
        unit = _power_of_two_near(g) / steps
        q = g.to(unit.dtype) / unit
        fine = (q * steps).round_().div_(steps)
        coarse = q.round().clamp_(min=1 - steps).clamp_(max=steps - 1)
        rounded = torch.where(q.abs() < 1, fine, coarse).mul_(unit).add_(g, alpha=0)
        return unrounded(bits, g, rounded.to(g.dtype))


def _direct(x: Tensor, bits: Tensor, largest: Tensor | None = None) -> Tensor:
    """``x`` rounded to the grid of step ``2^(1 - bits)``, and clipped to ``largest`` in size if that is given."""
    dtype = work_dtype(x)
    steps = _steps_to_one(bits, dtype)
    value = x.to(dtype)
    if largest is not None:
        value = value.minimum(largest).maximum(-largest)
    # Numbers from 1 / eps on are integers, so they are on the grid already, and their product below could overflow.
    rounded = torch.where(value.abs() < 1 / torch.finfo(dtype).eps, (value * steps).round_() / steps, value)
    rounded = rounded + 0 * x  # the clipping hides an infinite value; 0 * inf is NaN
    return torch.where(is_rounded(bits), rounded.to(x.dtype), x)


def _constant(g: Tensor) -> Tensor:
    """The gradient of a weight: scaled to about ``_GRADIENT_LEVELS`` in size, stochastically rounded, clipped."""
    if g.numel() == 0:
        return g
    q = g.to(work_dtype(g)) / _power_of_two_near(g) * _GRADIENT_LEVELS
    q.add_(dither(q)).round_().clamp_(1 - _GRADIENT_LEVELS, _GRADIENT_LEVELS - 1)
    return (q.mul_(_GRADIENT_UNIT) + 0 * g).to(g.dtype)


def _steps_to_one(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """``2^(bits - 1)``; 1 for 0 bits, whose result is replaced."""
    return (1 << (bits.long() - 1).clamp(min=0)).to(dtype)


def _power_of_two_near(x: Tensor) -> Tensor:
    """``R(x)``: the power of two nearest, on a logarithmic scale, to the largest |x|; the smallest usable one for 0."""
    largest = x.abs().amax().to(work_dtype(x))
    exponent = largest.log2().round_().clamp(_SMALLEST_EXPONENT, _LARGEST_EXPONENT)
    return torch.where(largest == 0, 2.0**_SMALLEST_EXPONENT, exponent.exp2())
