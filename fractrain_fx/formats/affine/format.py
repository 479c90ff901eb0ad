"""The affine format: 2^bits evenly spaced levels between the ends of a range (SBM; ALGORITHM 2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fractrain_fx.config.choices import GradientGrid
from fractrain_fx.errors import InputError
from fractrain_fx.formats.affine.gate_gradient import affine_gains
from fractrain_fx.formats.affine.grid import modest
from fractrain_fx.formats.affine.kernels import has_kernels, measure_compiled
from fractrain_fx.formats.affine.rounding import decode_affine, encode_affine, round_affine, shifted_to_zero
from fractrain_fx.formats.base import Bits, CodedFormat, SampleAxis
from fractrain_fx.formats.bits import as_bits, dense, once, readable, work_dtype

__all__ = ["AffineFormat", "fake_quantize", "measure"]


class AffineFormat(CodedFormat):
    """Activations over the whole tensor, weights over each output channel, gradients rounded stochastically.

    Args:
        compiled: round on a CPU, find ranges and the gradient of choices by C++ kernels.
        gradient_grid: ``zero`` shifts the levels of gradients so that one of them is 0 (``FracConfig.gradient_grid``).
    """

    name = "affine"

    def __init__(self, *, compiled: bool = False, gradient_grid: GradientGrid = "range") -> None:
        self.compiled = compiled
        self.gradient_grid = gradient_grid

    def activation_range(self, x: Float[Tensor, "*dims"]) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        return measure(x, compiled=self.compiled)

    def activation(
        self,
        x: Float[Tensor, "*dims"],
        bits: Bits,
        *,
        lo: Float[Tensor, ""],
        span: Float[Tensor, ""],
        inside: bool = False,
        out: Tensor | None = None,
    ) -> Float[Tensor, "*dims"]:
        if not x.numel():
            return x
        return round_affine(x, as_bits(bits, x), lo, span, inside=inside, quick=True, compiled=self.compiled, out=out)

    def activation_codes(
        self,
        x: Float[Tensor, "*dims"],
        bits: Int[Tensor, ""],
        *,
        lo: Float[Tensor, ""],
        span: Float[Tensor, ""],
        inside: bool = False,
        out: Tensor | None = None,
    ) -> tuple[Int[Tensor, "*dims"], Float[Tensor, "*dims"]]:
        return encode_affine(x, bits, lo, span, inside=inside, compiled=self.compiled, out=out)

    def activation_values(
        self,
        codes: Int[Tensor, "*dims"],
        bits: Int[Tensor, ""],
        *,
        lo: Float[Tensor, ""],
        span: Float[Tensor, ""],
        inside: bool = False,
        out: Tensor | None = None,
    ) -> Float[Tensor, "*dims"]:
        return decode_affine(codes, bits, lo, span, inside=inside, compiled=self.compiled, out=out)

    def activation_gains(
        self,
        x: Float[Tensor, "batch ..."],
        g: Float[Tensor, "batch ..."],
        bits: Sequence[int],
        *,
        lo: Float[Tensor, ""],
        span: Float[Tensor, ""],
        inside: bool = False,
    ) -> Float[Tensor, "batch options"]:
        return affine_gains(x, g, bits, lo, span, inside, self.compiled)

    def weight_range(self, w: Float[Tensor, "*dims"], *, dim: int | None) -> tuple[Tensor, Tensor]:
        return measure(w, dim, compiled=self.compiled)

    def weight(
        self,
        w: Float[Tensor, "*dims"],
        bits: Bits,
        *,
        dim: int | None,
        ends: tuple[Tensor, Tensor] | None = None,
        out: Tensor | None = None,
    ) -> Float[Tensor, "*dims"]:
        if not w.numel():
            return w
        lo, span = ends or measure(w, dim, compiled=self.compiled)
        return round_affine(w, as_bits(bits, w), lo, span, inside=True, quick=True, compiled=self.compiled, out=out)

    def gradient(
        self,
        g: Float[Tensor, "*dims"],
        bits: Bits,
        *,
        axis: SampleAxis,
        seed: Int[Tensor, ""] | None = None,
        out: Tensor | None = None,
    ) -> Float[Tensor, "*dims"]:
        if not g.numel():
            return g
        bits = as_bits(bits, g)
        lo, span, inside = self.gradient_range(g, bits)
        return round_affine(
            g,
            bits,
            lo,
            span,
            stochastic=True,
            seed=seed,
            inside=inside,
            quick=True,
            compiled=self.compiled,
            out=out,
        )

    def gradient_range(
        self, g: Float[Tensor, "*dims"], bits: Int[Tensor, "*bits"]
    ) -> tuple[Float[Tensor, "*ends"], Float[Tensor, "*ends"], bool]:
        """Low end and width of the range that a gradient is rounded in, and whether all its values lie inside."""
        lo, span = measure(g, compiled=self.compiled)
        if self.gradient_grid == "range":
            return lo, span, True
        return *shifted_to_zero(bits, lo, span), False


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
    result ``q * scale + lo`` (ALGORITHM 2). Half types are computed in float32. Whatever shares a measured range with a
    NaN or an infinite value becomes NaN; in a given range only such values do.

    Args:
        x: values of any shape, strides and floating-point type.
        bits: 0 and 32 leave ``x`` as it is, bit for bit; a tensor broadcasts against ``x`` (bits of each sample).
        dim: one range for each index of this dimension; None: one for the whole tensor.
        lo: low end of a range to use instead of that of ``x``: one value, or with ``dim`` one for each index.
        span: width of that range; values outside it are clamped to its ends.
        stochastic: add noise, uniform from -0.5 to 0.5, before rounding, so that the expected value is ``x``.

    Returns:
        The rounded values, in the type of ``x``.

    Raises:
        InputError: ``bits`` outside 0..32, a ``dim`` that ``x`` lacks, or only one of ``lo`` and ``span``.
    """
    if (lo is None) != (span is None):
        raise InputError("half a range was given: pass both lo and span, or neither to have them measured")
    if x.numel() == 0:
        return x
    measured = lo is None or span is None
    if lo is None or span is None:
        lo, span = measure(x, dim)
    shape, dtype = _range_shape(x, dim), work_dtype(x)
    lo, span = (torch.as_tensor(end, dtype=dtype, device=x.device).detach().reshape(shape) for end in (lo, span))
    rounded: Tensor = _FakeQuantize.apply(x, as_bits(bits, x), lo, span, stochastic, measured)
    return rounded


def measure(
    x: Float[Tensor, "*dims"], dim: int | None = None, *, compiled: bool = False
) -> tuple[Float[Tensor, "*ends"], Float[Tensor, "*ends"]]:
    """Low end and width of the range of ``x``.

    Finite values have a finite width: where their type cannot hold it, the widest it can, and the largest of them
    saturate. NaN or infinite values have a range that is not finite, no values a NaN range.

    Args:
        x: values of any shape and floating-point type; half types are measured in float32.
        dim: one range for each index of this dimension (the others become 1); None: one for the tensor (0-dim).
        compiled: by the C++ kernel where it takes the values; the result is the same.

    Returns:
        ``lo`` and ``span``, outside autograd, in float32 (float64 for float64).

    Raises:
        InputError: ``x`` has no such ``dim``.
    """
    if x.requires_grad:
        x = x.detach()
    shape = _range_shape(x, dim)
    if x.numel() == 0:
        nan = x.new_full(shape, torch.nan, dtype=work_dtype(x))
        return nan, nan
    if compiled and has_kernels(x) and (dim is None or dim % x.ndim == 0):
        return measure_compiled(x, shape)
    if dim is None:
        # The order of the values does not matter, and torch would copy them into another one.
        flat = readable(x) and not x.is_contiguous() and dense(x)
        lo, hi = torch.aminmax(x.as_strided((x.numel(),), (1,)) if flat else x)
    else:
        others = [each for each in range(x.ndim) if each != dim % x.ndim]
        lo, hi = (x.amin(others, keepdim=True), x.amax(others, keepdim=True)) if others else (x, x)
    if x.dtype != work_dtype(x):
        lo, hi = lo.to(work_dtype(x)), hi.to(work_dtype(x))
    span = hi - lo
    if modest(span):
        return lo, span
    # (2^bits - 1) * scale + lo can come out a few roundings above hi, which must not overflow. What is no number in
    # the difference of an end to itself keeps the range of infinite values from being taken for a wide one.
    reach = torch.finfo(lo.dtype).max * (1 - 2**-20)
    return lo, once(span.clamp(max=reach) + (hi - hi))


class _FakeQuantize(torch.autograd.Function):
    """The rounding, with the identity as its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bits: Tensor, lo: Tensor, span: Tensor, stochastic: bool, measured: bool
    ) -> Tensor:
        rounded = round_affine(x, bits, lo, span, stochastic=stochastic, inside=measured)
        return x.clone() if rounded is x else rounded

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None, None, None, None


def _range_shape(x: Tensor, dim: int | None) -> list[int]:
    """The shape of a range that broadcasts against ``x``."""
    if dim is None:
        return []
    if not -x.ndim <= dim < x.ndim:
        raise InputError(f"dim={dim} asks for a range per channel, but the tensor has shape {tuple(x.shape)}")
    return [size if d == dim % x.ndim else 1 for d, size in enumerate(x.shape)]
