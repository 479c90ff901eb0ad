"""A fused op on integer codes: products of bytes that give the numbers of the simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fractrain_fx.config import CODE_BITS
from fractrain_fx.execution.int8.products import (
    Codes,
    error_product,
    product,
    select_rows,
    some_rows,
    spread,
    weight_product,
)
from fractrain_fx.execution.int8.rows import GRADIENT_BITS, CodedRows, both_coded, has_codes, in_float
from fractrain_fx.execution.int8.windows import Windows, window_errors
from fractrain_fx.execution.simulated.arithmetic import Gradients, Needs
from fractrain_fx.execution.simulated.operand import Factor, Rounds
from fractrain_fx.execution.simulated.strategy import FIRST, GRADIENT, SECOND, Call, Contracted, Plan
from fractrain_fx.formats.affine import measure
from fractrain_fx.formats.affine.kernels import coded_compiled, coded_gradient_compiled
from fractrain_fx.formats.affine.rounding import bits_in_use, code_ends, codes_affine
from fractrain_fx.formats.bits import put_where
from fractrain_fx.formats.scratch import scratch
from fractrain_fx.nn.rounding import rounded_gradient

__all__ = ["Coded"]


@dataclass(frozen=True)
class Coded(CodedRows):
    """A product of codes, whose bits are known on the host.

    Rows without codes are multiplied in float. These are the rows of samples whose activation is not rounded (0 or 32
    bits) and, for the gradient of the weight, of samples whose gradient has more bits than a code.

    Attributes:
        compiled: whether the simulation rounds by C++ kernels.
        multiplied: whether C++ kernels multiply the codes; otherwise ``torch._int_mm`` does.
    """

    compiled: bool = False
    multiplied: bool = False

    def forward(self, plan: Plan, call: Call) -> Contracted:
        a, b, added = call.a, call.b, call.added
        w = self._weight(b, None, call.of_b)
        x = self._activation(plan.first, a, call.of_a)
        bias = added if added is not None and added.ndim == 1 else None
        y = self._product(plan, call, x, w, bias)
        # A NaN or infinite value makes a range measured on it not finite. In another range its code hides it.
        if not call.of_a.within.measured_here and (bad := self._bad(plan, a)) is not None:
            y.add_(bad)
        apart = self.apart(plan.first.axis, a.shape, len(y), y.device)
        if apart is not None:
            y.index_copy_(0, apart, self._float_product(plan, call, apart, bias))
        out = self.layout.output(y, a)
        if added is not None and bias is None:
            out.add_(added)
        return out, None, w.codes if plan.second.saves_more(b) else None

    def backward(
        self, plan: Plan, call: Call, g: Tensor, saved: tuple[Tensor | None, Tensor | None], needs: Needs
    ) -> Gradients:
        added = call.added if needs[2] else None
        summed = added is not None and added.ndim == 1 and needs[1]  # a bias's gradient comes with the weight's
        rounded, codes = self._gradient(plan, call, g, values=added is not None and not summed)
        rows = None if rounded is None else self.layout.output_rows(rounded)
        of_a = of_b = of_added = None
        if needs[0]:
            w = self._weight(call.b, saved[1], call.of_b)
            errors = codes if rows is None else rows
            assert errors is not None
            of_a = self.layout.activation(self._errors(errors, w, call.a.shape, g), g)
        if needs[1]:
            x = self._activation(plan.first, call.a, call.of_a)
            of_weight, sums = self._of_weight(plan, call, g, rows, codes, x)
            of_b = self.layout.weight(of_weight, call.b)
            of_added = sums.sum_to_size(added.shape) if added is not None and summed else None
        if added is not None and not summed:
            assert rounded is not None
            of_added = self.layout.added(rounded, added)
        return of_a, of_b, of_added

    def _product(self, plan: Plan, call: Call, x: Codes, w: Codes, bias: Tensor | None) -> Tensor:
        """The rows of the output."""
        return product(x, w, bias, compiled=self.multiplied)

    def _float_product(self, plan: Plan, call: Call, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Some rows of the output, whose activation is not rounded."""
        rounded = self.layout.columns(plan.second.again(call.b, None, call.of_b, SECOND))
        return F.linear(self.layout.rows(call.a)[rows], rounded, bias)

    def _bad(self, plan: Plan, a: Tensor) -> Tensor | None:
        """NaN for each row of the output with a NaN or infinite value (0 * inf), else 0; ``None`` if all are 0."""
        rows = self.layout.rows(a)
        return (rows.amax(1).mul_(0) + rows.amin(1).mul_(0)).unsqueeze(1)

    def _errors(self, errors: Tensor | Codes, w: Codes, x: Sequence[int], g: Tensor) -> Tensor:
        """The rows of the gradient of an activation of shape ``x``; ``g`` is the output's gradient."""
        if isinstance(self.layout, Windows):
            assert isinstance(errors, Tensor)
            return window_errors(errors, w, self.layout, g.shape)
        return error_product(errors, w, compiled=self.multiplied)

    def _coded_weight(self, g: Codes, x: Codes, w: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of the weight and of a bias from all rows that have codes, by C++ kernels."""
        return weight_product(g, x, compiled=True)

    def _float_weight(self, plan: Plan, call: Call, g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of the weight and of a bias from rows in float."""
        return g.t().mm(x), g.sum(0)

    def _weight(self, w: Tensor, saved: Tensor | None, at: Rounds) -> Codes:
        if saved is None and self.multiplied and (found := coded_compiled(w, *at)) is not None:
            return Codes(self.layout.columns(found[0]), *found[1:])
        if saved is None:
            out = scratch(w, SECOND, "matrices")
            saved = self.layout.columns(self._codes(w, at, torch.int8, out=out)[0])
        scale, zero = self._ends(at)
        return Codes(saved, scale.flatten(), zero.flatten())

    def _activation(self, factor: Factor, x: Tensor, at: Rounds) -> Codes:
        """The codes of an activation as a matrix."""
        at = at._replace(bits=factor.axis.expand(at.bits, x.shape))
        codes, scale, zero = self._encoded(x, at)
        rows = self.layout.code_rows(codes, at.bits)
        return self._with_ends(rows, at.bits, codes.shape, scale, zero)

    def _encoded(self, x: Tensor, at: Rounds) -> tuple[Tensor, Tensor, Tensor]:
        """The codes of an activation, their scales and zeros."""
        if self.multiplied and (found := coded_compiled(x, *at)) is not None:
            return found
        out = scratch(x, FIRST, "matrices")
        return self._codes(x, at, torch.int8, out=out)[0], *self._ends(at)

    def _gradient(self, plan: Plan, call: Call, g: Tensor, *, values: bool) -> tuple[Tensor | None, Codes | None]:
        """The rounded gradient, bit for bit that of the simulation, and its codes, if any row has codes.

        The values may be left out if all rows have codes and ``values`` does not ask for them.
        """
        assert call.bits is not None
        coded = [bits for bits in self.bw if 0 < bits <= GRADIENT_BITS]
        if not coded:
            out = scratch(g, GRADIENT, "matrices")
            return rounded_gradient(plan.fmt, g, call.bits, plan.axis, call.seed, out), None
        bits = self.axis(plan, g).expand(call.bits, g.shape)
        wide = max(coded) > CODE_BITS
        dtype = torch.int16 if wide else torch.int8
        values = values or any(in_float(fw, bw) for fw, bw in self.pairs())
        if self.multiplied:
            rounded = _memory(g) if values else None
            if (found := coded_gradient_compiled(g, bits, call.seed, dtype, rounded)) is not None:
                return rounded, self._with_ends(self.layout.output_rows(found[0]), bits, g.shape, *found[1:])
        within = measure(g, compiled=self.compiled)
        at = Rounds(bits_in_use(bits, within.span) if wide else bits, within)
        how = {"stochastic": True, "seed": call.seed, "values": True, "out": _memory(g)}
        codes, rounded = self._codes(g, at, dtype, **how)
        assert rounded is not None
        matrix = self._with_ends(self.layout.output_rows(codes), bits, g.shape, *self._ends(at))
        return put_where(bits, (0,), 0.0, rounded), matrix

    def _with_ends(self, codes: Tensor, bits: Tensor, shape: Sequence[int], scale: Tensor, zero: Tensor) -> Codes:
        """Codes with the scale and zero of each row, from those of the samples that ``bits`` belong to."""
        if bits.numel() == 1:
            return Codes(codes, scale.view(()), zero.view(()))
        if self.multiplied and bits.shape[0] == bits.numel():
            return Codes(codes, scale.flatten(), zero.flatten())
        each = (self.layout.each(ends.view(bits.shape), shape, len(codes)) for ends in (scale, zero))
        return Codes(codes, *each)

    def _ends(self, at: Rounds) -> tuple[Tensor, Tensor]:
        """Scale and zero of signed codes; the zero is NaN if the range is not finite."""
        return code_ends(*at, compiled=self.compiled)

    def _codes(self, x: Tensor, at: Rounds, dtype: torch.dtype, **how: Any) -> tuple[Tensor, Tensor | None]:
        return codes_affine(x, *at, dtype=dtype, compiled=self.compiled, **how)

    def _of_weight(
        self, plan: Plan, call: Call, g: Tensor, rounded: Tensor | None, codes: Codes | None, x: Codes
    ) -> tuple[Tensor, Tensor]:
        """The gradients of the weight and of a bias. Rows, which may each have their own scale, are summed over.

        C++ kernels multiply all rows that have codes at once; ``torch._int_mm`` multiplies those of one pair of bits.
        """
        together = codes if self.multiplied else None
        found = None if together is None else self._together(plan, call, g, together, x)
        for fw, bw, rows in self.groups(plan, call, g, len(x.codes), without_coded=together is not None):
            if codes is not None and both_coded(fw, bw):
                part = weight_product(some_rows(codes, rows, narrow=bw <= CODE_BITS), some_rows(x, rows))
            else:
                assert rounded is not None
                values = self._values(call, x, rows, coded=has_codes(fw))
                part = self._float_weight(plan, call, select_rows(rounded, rows), values)
            found = part if found is None else (found[0].add_(part[0]), found[1].add_(part[1]))
        if found is not None:
            return found
        assert rounded is not None
        columns = self.layout.columns(call.b)
        return rounded.new_zeros(columns.shape), rounded.new_zeros(len(columns))

    def _values(self, call: Call, x: Codes, rows: Tensor | None, *, coded: bool) -> Tensor:
        """Some rows of the rounded activation, in float."""
        if not coded:
            return select_rows(self.layout.rows(call.a), rows)
        some = some_rows(x, rows)
        return some.codes * some.scale + some.zero

    def _together(self, plan: Plan, call: Call, g: Tensor, codes: Codes, x: Codes) -> tuple[Tensor, Tensor] | None:
        """The contribution of the rows whose activation and gradient both have codes."""
        pairs = self.pairs()
        if not any(both_coded(fw, bw) for fw, bw in pairs):
            return None
        left_out = [in_float(fw, bw) for fw, bw in pairs]
        if any(left_out):  # rows of 0 bits have scale 0 already
            rows = self.by_row(plan, call, g, torch.tensor(left_out), len(codes.codes))
            codes = codes._replace(scale=spread(codes.scale, len(rows)).masked_fill(rows, 0))
        return self._coded_weight(codes, x, call.b)


def _memory(g: Tensor) -> Tensor:
    """Memory for a rounded gradient."""
    memory = scratch(g, GRADIENT, "matrices")
    return torch.empty_like(g) if memory is None else memory
