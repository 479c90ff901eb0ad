"""The three products of a contraction on integer codes, with the numbers that rounded values give in float.

A rounded value is ``scale * code + zero`` with an integer code. So a product of rounded values is a product of codes,
summed in 32 bits, plus corrections of rank 1. ``torch._int_mm`` multiplies bytes only, so a code of more than 8 bits
becomes two bytes, ``256 * high + low``, which are multiplied as codes. The C++ kernels multiply 16-bit codes too.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Int8, Int16
from torch import Tensor
from torch.nn import functional as F

from fractrain_fx.native import kernels

__all__ = [
    "Codes",
    "error_product",
    "fixed_point",
    "int_mm",
    "limb_product",
    "limbs_of",
    "product",
    "select_rows",
    "some_rows",
    "spread",
    "weight_product",
    "with_ends",
]

# The sum of more products of two bytes than this may not fit into 32 bits. CUDA needs a multiple of 8.
_LONGEST = (1 << 17) - 8

# The places of the two bytes of a 16-bit number in memory.
LOW, HIGH = (0, 1) if sys.byteorder == "little" else (1, 0)

# With its top bit flipped, reading the low byte as signed subtracts 128.
_LESS = 128

# Far below any gradient; its reciprocal is far from overflow in float32.
_SMALLEST_UNIT = 1e-30

# The largest value of ``256 * high + low`` for two signed bytes.
_LARGEST = 127 * 256 + 127


class Codes(NamedTuple):
    """A matrix whose values are ``scale * code + zero``.

    Attributes:
        codes: 8-bit codes; a gradient's may have 16 bits.
        scale: one for all codes or one for each row; the C++ kernels also take one for each of several equal runs of
            rows.
        zero: one for each scale.
    """

    codes: Int[Tensor, "rows inner"]
    scale: Float[Tensor, "*runs"]
    zero: Float[Tensor, "*runs"]


def product(
    x: Codes, w: Codes, bias: Float[Tensor, "#outputs"] | None = None, *, compiled: bool = False
) -> Float[Tensor, "rows outputs"]:
    """``x @ w.T + bias`` for activations with one scale or one for each row, and a weight with one for each row.

    ``sum_k x w = s_x s_w P + s_x z_w sum_k q_x + z_x sum_k w``, where ``P`` is the product of codes.

    Args:
        x: activations.
        w: weight.
        bias: what is added to each output.
        compiled: use the C++ kernel.
    """
    if compiled:
        y: Tensor = kernels().code_product(*x, w.codes.t(), w.scale, w.zero, None, bias)
        return y
    whole = _row_sums(w.codes) * w.scale + x.codes.shape[1] * w.zero
    sums = _row_sums(x.codes).unsqueeze(1)
    y = int_mm(x.codes, w.codes.t())
    if x.scale.ndim:
        y.mul_(w.scale).addcmul_(sums, w.zero).mul_(x.scale.unsqueeze(1)).addcmul_(x.zero.unsqueeze(1), whole)
        return y if bias is None else y.add_(bias)
    start = whole * x.zero if bias is None else torch.addcmul(bias, whole, x.zero)
    return y.mul_(w.scale * x.scale).addcmul_(sums, w.zero * x.scale).add_(start)


def error_product(
    g: Float[Tensor, "rows outputs"] | Codes, w: Codes, *, compiled: bool = False
) -> Float[Tensor, "rows inner"]:
    """``g @ w`` for a weight with a scale for each row. The rows of the weight are summed over.

    So its scales are multiplied into ``g``, which is then rounded to 16-bit fixed-point numbers, with one unit for each
    row. The product has no other rounding than that and float32's. A row of zeros in ``g`` gives a row of zeros. The
    C++ kernel (``compiled``) also takes codes.
    """
    if compiled:
        errors: Tensor = kernels().error_product(*with_ends(g), *w)
        return errors
    assert isinstance(g, Tensor)
    numbers, unit = fixed_point(g, w.scale, len(g))
    dx = limb_product(numbers, w.codes)
    return torch.addcmul(g.mv(w.zero).unsqueeze(1), dx, unit, out=dx)


def with_ends(g: Tensor | Codes) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """A gradient as the C++ kernels take it: codes with their scales and zeros, or values without."""
    return g if isinstance(g, Codes) else (g, None, None)


def fixed_point(
    g: Float[Tensor, "rows outputs"], scale: Float[Tensor, " outputs"], runs: int
) -> tuple[Int16[Tensor, "rows outputs"], Float[Tensor, "runs 1"]]:
    """``g * scale`` as whole numbers times a unit, and the units, one for each of ``runs`` equal runs of rows."""
    h = (g * scale).reshape(runs, -1)
    unit = torch.maximum(h.amax(1, keepdim=True), -h.amin(1, keepdim=True)).div_(_LARGEST).clamp_(min=_SMALLEST_UNIT)
    return h.mul_(unit.reciprocal()).round_().to(torch.int16).view(g.shape), unit


def limb_product(numbers: Int16[Tensor, "rows inner"], codes: Int8[Tensor, "inner columns"]) -> Tensor:
    """The product of the whole numbers of :func:`fixed_point` with codes, byte by byte."""
    limbs = limbs_of(numbers.add(_LESS)).movedim(-1, 0).contiguous()
    found = int_mm(limbs.flatten(0, 1), codes).view(2, len(numbers), -1)
    return found[HIGH].mul_(256).add_(found[LOW])


def weight_product(
    g: Codes, x: Codes, *, compiled: bool = False
) -> tuple[Float[Tensor, "outputs inner"], Float[Tensor, " outputs"]]:
    """``g.T @ x``, and the sum of the rows of ``g``, whose codes may have 16 bits. Both matrices have a single scale.

    For the C++ kernel (``compiled``) each row may have its own scale; rows of ``g`` with scale 0 are left out.
    """
    if compiled:
        of_weight, of_bias = kernels().code_product_of_rows(*g, *x)
        return of_weight, of_bias
    rows, outputs = g.codes.shape
    wide = g.codes.dtype == torch.int16
    codes = limbs_of(g.codes) if wide else g.codes
    zero = g.zero.double() + _LESS * g.scale.double() if wide else g.zero.double()
    found = int_mm(codes.flatten(1).t(), x.codes)
    sums = _column_sums(codes)
    if wide:
        found = found.view(outputs, 2, -1)
        found = found[:, HIGH].mul_(256).add_(found[:, LOW])
        sums = sums[:, HIGH] * 256 + sums[:, LOW]
    whole = sums * g.scale + rows * zero
    of_g = (whole * x.zero).to(found.dtype)
    of_x = (_column_sums(x.codes) * x.scale * zero).to(found.dtype)
    return found.mul_(g.scale * x.scale).add_(of_g.unsqueeze(1)).add_(of_x), whole.to(found.dtype)


def limbs_of(numbers: Int16[Tensor, "rows inner"]) -> Int8[Tensor, "rows inner 2"]:
    """Numbers as ``256 * high + low + 128``, with signed bytes ``high`` and ``low``."""
    # Flips the top bit of the low byte, which read as signed is then 128 less.
    turned = numbers.contiguous().bitwise_xor(_LESS)
    return turned.view(-1).view(torch.int8).view(*turned.shape, 2)


def int_mm(
    a: Int8[Tensor, "rows inner"], b: Int8[Tensor, "inner columns"], *, pad: bool | None = None
) -> Float[Tensor, "rows columns"]:
    """``a @ b``, summed in int32 and given in float32.

    Args:
        a: codes.
        b: codes.
        pad: pad the sizes as CUDA's kernel needs them (more than 16 rows, multiples of 8 for the others) and make the
            operands contiguous; by default only on a CUDA device.
    """
    rows, columns = a.shape[0], b.shape[1]
    if a.is_cuda if pad is None else pad:
        a = F.pad(a, (0, -a.shape[1] % 8, 0, max(0, 17 - rows))).contiguous()
        b = F.pad(b, (0, -columns % 8, 0, -b.shape[0] % 8)).contiguous()
    a, b = _with_usual_strides(a), _with_usual_strides(b)
    found = torch._int_mm(a[:, :_LONGEST], b[:_LONGEST]).to(torch.float32)
    for start in range(_LONGEST, a.shape[1], _LONGEST):
        found += torch._int_mm(a[:, start : start + _LONGEST], b[start : start + _LONGEST]).to(torch.float32)
    return found[:rows, :columns]


def _with_usual_strides(matrix: Tensor) -> Tensor:
    """The matrix; one with a side of 1 gets the strides of a matrix in rows.

    From strides of 1 and 1, as the transpose of a column has, ``torch._int_mm`` reads beyond the matrix on a CPU.
    """
    return matrix.contiguous().as_strided(matrix.shape, (matrix.shape[1], 1)) if 1 in matrix.shape else matrix


def some_rows(matrix: Codes, rows: Int[Tensor, " some"] | None, *, narrow: bool = False) -> Codes:
    """Some rows, which share one scale, or all rows; ``narrow`` stores codes of at most 8 bits in one byte each."""
    codes = select_rows(matrix.codes, rows)
    if narrow:
        codes = codes.to(torch.int8)
    scale, zero = (
        each if each.ndim == 0 else select_rows(spread(each, len(matrix.codes)), rows)[0]
        for each in (matrix.scale, matrix.zero)
    )
    return Codes(codes, scale, zero)


def select_rows(x: Tensor, rows: Int[Tensor, " some"] | None) -> Tensor:
    """Some rows, or all."""
    return x if rows is None else x[rows]


def spread(ends: Float[Tensor, " runs"], rows: int) -> Float[Tensor, " rows"]:
    """One number for each row, from one for each of several equal runs of rows."""
    return ends.expand(rows) if ends.numel() == 1 else ends.repeat_interleave(rows // len(ends))


def _row_sums(codes: Tensor) -> Tensor:
    return codes.sum(1, dtype=torch.int32).to(torch.float32)


def _column_sums(codes: Tensor) -> Tensor:
    """Sums of columns in float64: there is a row for each position, and large codes scale the sums."""
    return codes.sum(0, dtype=torch.int32).double()
