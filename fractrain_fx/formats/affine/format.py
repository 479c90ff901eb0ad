"""The affine format: 2^bits evenly spaced levels between the ends of a range (SBM, arXiv 1805.11046)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fractrain_fx.config.affine import AffineConfig
from fractrain_fx.errors import InputError
from fractrain_fx.formats.affine.gate_gradient import affine_gains
from fractrain_fx.formats.affine.rounding import (
    codes_affine,
    reach_affine,
    round_affine,
    shifted_to_zero,
    values_affine,
)
from fractrain_fx.formats.affine.scale import levels_of
from fractrain_fx.formats.base import Bits, Format, Operand, Reach, Seed, ValueRange, Values
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.formats.bits import as_bits, checked_bits, dense, once, readable, work_dtype

__all__ = ["AffineFormat", "fake_quantize", "measure", "range_between", "range_shape"]

# A range at least this wide may be wider than float32 holds, or have a level beyond it.
_WIDE = 1e38


class AffineFormat(Format):
    """One range for an activation, one for each output channel of a weight; gradients are rounded stochastically (SBM).

    Args:
        affine: ``gradient_grid='zero'`` shifts the levels of gradients so that one is 0, and ``ranges='sample'`` gives
            each sample of an activation or gradient a range of its own.
    """

    name = "affine"
    has_codes = True

    def __init__(self, affine: AffineConfig = AffineConfig()) -> None:
        self.gradient_grid = affine.gradient_grid
        self.by_sample = affine.ranges == "sample"

    def measure(self, x: Values, dim: int | None = None) -> ValueRange:
        """The range of ``x``, as :func:`measure` gives it."""
        return measure(x, dim)

    def activation_range(self, x: Values) -> ValueRange:
        return self.measure(x)

    def activation(self, x: Values, bits: Bits, within: ValueRange, *, out: Tensor | None = None) -> Values:
        if not x.numel():
            return x
        return self._round(x, as_bits(bits, x), within, out=out)

    def activation_gains(
        self,
        x: Float[Tensor, "batch ..."],
        g: Float[Tensor, "batch ..."],
        bits: Sequence[int],
        within: ValueRange,
        squared: bool = False,
    ) -> Float[Tensor, "batch options"]:
        if within.lo.ndim or x.dtype != within.lo.dtype or not readable(x):
            return super().activation_gains(x, g, bits, within, squared)
        return affine_gains(x, g, bits, within, squared)

    def weight_range(self, w: Values, *, dim: int | None) -> ValueRange:
        return self.measure(w, dim)

    def weight(
        self, w: Values, bits: Bits, *, dim: int | None, within: ValueRange | None = None, out: Tensor | None = None
    ) -> Values:
        if not w.numel():
            return w
        within = within or self.weight_range(w, dim=dim)
        return self._round(w, as_bits(bits, w), within, out=out)

    def gradient(
        self, g: Values, bits: Bits, *, axis: BatchAxis, seed: Seed = None, out: Tensor | None = None
    ) -> Values:
        if not g.numel():
            return g
        bits = as_bits(bits, g)
        within = self.gradient_range(g, bits, axis)
        # The largest noise may carry a zero to the next level, because float32 rounds its level number.
        zeros = g == 0 if self.gradient_grid == "zero" else None
        rounded = self._round(g, bits, within, stochastic=True, seed=seed, out=out)
        return rounded if zeros is None else rounded * ~zeros

    def gradient_range(self, g: Values, bits: Int[Tensor, "*bits"], axis: BatchAxis | None) -> ValueRange:
        """The range in which a gradient is rounded, or those of its samples, which broadcast against it."""
        return self._of_gradients(bits, self.measure(g) if axis is None else self.sample_ranges(g, axis))

    def _of_gradients(self, bits: Int[Tensor, "*bits"], within: ValueRange) -> ValueRange:
        return within if self.gradient_grid == "range" else shifted_to_zero(bits, within)

    def sample_ranges(self, x: Values, axis: BatchAxis) -> ValueRange:
        if axis.whole or not self.by_sample:
            return self.measure(x)
        if not axis.folded:
            return self.measure(x, axis.axis)
        lo, span, measured_here = self.measure(_samples_of(x, axis), 0)
        return ValueRange(axis.expand(lo.flatten(), x.shape), axis.expand(span.flatten(), x.shape), measured_here)

    def needed_bits(self, g: Values, bits: Int[Tensor, ""], axis: BatchAxis) -> Float[Tensor, " samples"]:
        """The bits that number the levels of each sample's gradient, as :meth:`gradient` rounds it in one range."""
        if not g.numel():
            return bits.expand(1)
        low, high = _samples_of(g, axis).to(work_dtype(g)).aminmax(dim=1)
        within = self._of_gradients(bits, range_between(low.amin(), high.amax()))
        levels = levels_of(within, bits)
        count = levels.places(high).ceil() - levels.places(low).floor() + 1
        return count.log2().ceil().clamp(min=1).minimum(bits)

    def reach(self, x: Values, bits: Int[Tensor, "*bits"], of: Operand, within: ValueRange | None) -> Reach:
        if within is None and of.tensor == "g":
            within = self.gradient_range(x, bits, of.samples)
        elif within is None:
            within = self.weight_range(x, dim=of.channel) if of.weight else self.activation_range(x)
        return reach_affine(bits, within)

    def codes(self, x: Values, bits: Int[Tensor, "*bits"], within: ValueRange) -> Int[Tensor, "*dims"]:
        """The codes of rounded values in int8: the numbers of their levels, minus ``2^(bits - 1)``.

        Args:
            x: values of the type of the range, not empty.
            bits: 1 to 8.
            within: their range.
        """
        return codes_affine(x, bits, within)

    def values(self, q: Values, bits: Int[Tensor, "*bits"], within: ValueRange) -> Values:
        """The values of levels, bit for bit as they are rounded.

        Args:
            q: numbers of levels, in the type of the range; may be written into.
            bits: 1 to 8.
            within: the range.
        """
        return values_affine(q, bits, within)

    def _round(
        self,
        x: Tensor,
        bits: Tensor,
        within: ValueRange,
        *,
        stochastic: bool = False,
        seed: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        return round_affine(x, bits, within, stochastic=stochastic, seed=seed, out=out)


def fake_quantize(
    x: Float[Tensor, "*dims"],
    bits: int | Int[Tensor, "*bits"],
    *,
    dim: int | None = None,
    lo: float | Float[Tensor, "*ends"] | None = None,
    span: float | Float[Tensor, "*ends"] | None = None,
    stochastic: bool = False,
) -> Float[Tensor, "*dims"]:
    """Round ``x`` to its affine grid and back; the gradient passes straight through, without a mask.

    ``scale = max(span / (2^bits - 1), 1e-8)``, ``q = round(clamp((x - lo) / scale, 0, 2^bits - 1))`` with ties to even,
    result ``q * scale + lo`` (SBM, arXiv 1805.11046). Half types are computed in float32. A NaN or infinite value makes
    NaN of all values in its measured range; in a given range only that value becomes NaN.

    Args:
        x: values of any shape, strides and floating-point type.
        bits: 0 and 32 leave ``x`` as it is, bit for bit; a tensor broadcasts against ``x`` (bits of each sample).
        dim: one range for each index of this dimension; None: one for the whole tensor.
        lo: low end of a range to use instead of the measured one: one value, or with ``dim`` one for each index.
        span: width of that range; values outside it are clamped to its ends.
        stochastic: add noise, uniform from -0.5 to 0.5, before rounding, so that the expected value is ``x``.

    Returns:
        The rounded values, in the type of ``x``.

    Raises:
        InputError: ``bits`` that are not whole numbers from 0 to 32, or do not broadcast against ``x``; an ``x`` that
            is not floating-point, a ``dim`` that ``x`` lacks, only one of ``lo`` and ``span``, or a negative ``span``.
    """
    if not x.is_floating_point():
        raise InputError(f"fake_quantize rounds floating-point values, and this tensor holds {x.dtype}")
    bits = checked_bits(bits, x)
    if (lo is None) != (span is None):
        raise InputError("half a range was given: pass both lo and span, or neither to have them measured")
    if x.numel() == 0:
        return x
    measured_here = lo is None or span is None
    if lo is None or span is None:
        lo, span, _ = measure(x, dim)
    shape, dtype = range_shape(x, dim), work_dtype(x)
    lo, span = (torch.as_tensor(end, dtype=dtype, device=x.device).detach().reshape(shape) for end in (lo, span))
    if not measured_here and readable(span) and bool((span < 0).any()):
        raise InputError("span is the width of the range, and it is negative: pass lo=low end, span=high end - low end")
    rounded: Tensor = _FakeQuantize.apply(x, bits, lo, span, measured_here, stochastic)
    return rounded


def measure(x: Values, dim: int | None = None) -> ValueRange:
    """The range of ``x``.

    Finite values have a finite width. If their type cannot hold it, it is the widest that the type can hold, and the
    largest values saturate. NaN or infinite values have a range that is not finite; an empty tensor has a NaN range.

    Args:
        x: values of any shape and floating-point type; half types are measured in float32.
        dim: one range for each index of this dimension (the others become 1); None: one for the tensor (0-dim).

    Returns:
        The range, outside autograd, in float32 (float64 for float64).

    Raises:
        InputError: ``x`` has no such ``dim``.
    """
    if x.requires_grad:
        x = x.detach()
    shape = range_shape(x, dim)
    if x.numel() == 0:
        nan = x.new_full(shape, torch.nan, dtype=work_dtype(x))
        return ValueRange(nan, nan, True)
    if dim is None:
        # The order of the values does not matter; torch would first copy them to make them contiguous.
        flat = readable(x) and not x.is_contiguous() and dense(x)
        lo, hi = torch.aminmax(x.as_strided((x.numel(),), (1,)) if flat else x)
    else:
        others = [axis for axis in range(x.ndim) if axis != dim % x.ndim]
        lo, hi = (x.amin(others, keepdim=True), x.amax(others, keepdim=True)) if others else (x, x)
    if x.dtype != work_dtype(x):
        lo, hi = lo.to(work_dtype(x)), hi.to(work_dtype(x))
    return range_between(lo, hi)


def _samples_of(x: Values, axis: BatchAxis) -> Float[Tensor, "samples rest"]:
    """The values of each sample as one row.

    A call of another length than the recorded one has other numbers of rows: then parts of samples count as samples.
    """
    rows = x.shape[axis.axis]
    return axis.samples_first(x, rows // math.gcd(rows, axis.factor) if axis.folded else None)


def range_between(lo: Tensor, hi: Tensor) -> ValueRange:
    """The range from the lowest to the highest values, as :func:`measure` gives it."""
    span = hi - lo
    if readable(span) and float(span if span.numel() == 1 else span.amax()) < _WIDE:
        return ValueRange(lo, span, True)
    # (2^bits - 1) * scale + lo can come out a few roundings above hi, which must not overflow. `hi - hi` is NaN for an
    # infinite end, so an infinite range is not clamped to a finite one.
    reach = torch.finfo(lo.dtype).max * (1 - 2**-20)
    return ValueRange(lo, once(span.clamp(max=reach) + (hi - hi) + (lo - lo)), True)


class _FakeQuantize(torch.autograd.Function):
    """The rounding, with the identity as its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bits: Tensor, lo: Tensor, span: Tensor, measured_here: bool, stochastic: bool
    ) -> Tensor:
        rounded = round_affine(x, bits, ValueRange(lo, span, measured_here), stochastic=stochastic)
        return x.clone() if rounded is x else rounded

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None, None, None, None


def range_shape(x: Tensor, dim: int | None) -> list[int]:
    """The shape of a range that broadcasts against ``x``."""
    if dim is None:
        return []
    if not -x.ndim <= dim < x.ndim:
        raise InputError(f"dim={dim} asks for a range per channel, but the tensor has shape {tuple(x.shape)}")
    return [size if d == dim % x.ndim else 1 for d, size in enumerate(x.shape)]
