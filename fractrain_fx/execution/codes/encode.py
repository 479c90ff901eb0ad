"""The operands of a product as codes with their scales and zeros, by C++ kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fractrain_fx.config import CODE_BITS
from fractrain_fx.execution.codes.layout import Codes, Layout
from fractrain_fx.execution.codes.rows import GRADIENT_BITS, RowBits, both_coded, select_rows, spread
from fractrain_fx.execution.plan import Call, Plan
from fractrain_fx.execution.rounded import GRADIENT
from fractrain_fx.formats import ValueRange
from fractrain_fx.formats.scratch import scratch
from fractrain_fx.kernels.affine import code_ends_compiled, coded_compiled, coded_gradient_compiled
from fractrain_fx.nn.rounding import rounded_gradient

__all__ = ["encode_activation", "encode_gradient", "encode_weight", "values_of"]


def encode_weight(layout: Layout, call: Call, within: ValueRange | None, kept: Tensor | None) -> Codes | None:
    """The codes of the weight; ``None`` if its range is not finite.

    Args:
        layout: how the op is a product of rows.
        call: its tensors.
        within: the range of each output channel.
        kept: the codes, if they are known. Float values say that forward had no codes.
    """
    bits = call.of_b.bits
    if within is None or (kept is not None and kept.is_floating_point()):
        return None
    if kept is not None:
        scale, zero = code_ends_compiled(bits, *within[:2])
        return Codes(kept, scale.flatten(), zero.flatten())
    parts = coded_compiled(call.b, bits, within)
    return None if parts is None else Codes(layout.columns(parts[0]), parts[1].flatten(), parts[2].flatten())


def encode_activation(layout: Layout, plan: Plan, call: Call) -> Codes | None:
    """The codes of the activation; ``None`` if its range is not finite."""
    bits, within = call.of_a
    assert within is not None
    bits = plan.first.axis.expand(bits, call.a.shape)
    parts = coded_compiled(call.a, bits, within)
    return None if parts is None else _with_ends(layout, bits, *parts)


def encode_gradient(
    rows: RowBits, plan: Plan, call: Call, g: Tensor, *, values: bool
) -> tuple[Codes | None, Tensor | None] | None:
    """The codes of the gradient, if any row has codes, and its values, bit for bit those of products in float.

    Values may be left out if all rows have codes and ``values`` does not ask for them. ``None`` if the range is not
    finite.
    """
    assert call.bits is not None
    coded = [bits for bits in rows.bw if 0 < bits <= GRADIENT_BITS]
    memory = scratch(g, GRADIENT, "matrices")
    if not coded:
        return None, rounded_gradient(plan.fmt, g, call.bits, plan.axis, call.seed, memory)
    bits = rows.axis(plan, g).expand(call.bits, g.shape)
    dtype = torch.int16 if max(coded) > CODE_BITS else torch.int8
    rounded = None
    if values or any(bw and not both_coded(fw, bw) for fw, bw in rows.pairs()):
        rounded = torch.empty_like(g) if memory is None else memory
    parts = coded_gradient_compiled(g, bits, call.seed, dtype, rounded)
    return None if parts is None else (_with_ends(rows.layout, bits, *parts), rounded)


def values_of(matrix: Codes, rows: Tensor | None) -> Tensor:
    """The values of some rows, which share one scale, or of all."""
    ends: Sequence[Tensor] = matrix.scale, matrix.zero
    if matrix.scale.ndim:
        ends = [select_rows(spread(end, len(matrix.codes)), rows)[0] for end in ends]
    return select_rows(matrix.codes, rows) * ends[0] + ends[1]


def _with_ends(layout: Layout, bits: Tensor, codes: Tensor, scale: Tensor, zero: Tensor) -> Codes:
    """Codes as rows, with one scale and zero, with those of each sample, or with those of each row."""
    rows = layout.rows(codes)
    if bits.numel() == 1:
        return Codes(rows, scale.view(()), zero.view(()))
    if bits.shape[0] == bits.numel():
        return Codes(rows, scale.flatten(), zero.flatten())
    per_row = (layout.each(ends.view(bits.shape), codes.shape, len(rows)) for ends in (scale, zero))
    return Codes(rows, *per_row)
