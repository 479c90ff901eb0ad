"""A fused op on integer codes: products of bytes that give the numbers of the simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fractrain_fx.config import CODE_BITS
from fractrain_fx.execution.codes.layout import Codes
from fractrain_fx.execution.codes.rows import GRADIENT_BITS, RowBits, both_coded, select_rows, spread
from fractrain_fx.execution.simulated.arithmetic import Gradients, Needs
from fractrain_fx.execution.simulated.operand import Factor, Rounds
from fractrain_fx.execution.simulated.strategy import GRADIENT, SECOND, SIMULATED, Call, Contracted, Plan
from fractrain_fx.formats.scratch import scratch
from fractrain_fx.kernels.affine import code_ends_compiled, coded_compiled, coded_gradient_compiled
from fractrain_fx.nn.rounding import rounded_gradient

__all__ = ["Coded"]


@dataclass(frozen=True)
class Coded(RowBits):
    """A product of codes, whose bits are known on the host.

    Rows without codes are multiplied in float. These are the rows of samples whose activation is not rounded (0 or 32
    bits) and, for the gradient of the weight, of samples whose gradient has more bits than a code. If a range is not
    finite, nothing has codes, and all is multiplied in float.
    """

    def forward(self, plan: Plan, call: Call) -> Contracted:
        a, added = call.a, call.added
        x, w = self._activation(plan.first, a, call.of_a), self._weight(call.b, None, call.of_b)
        if x is None or w is None:
            return SIMULATED.forward(plan, call)
        bias = added if added is not None and added.ndim == 1 else None
        y = self.layout.output(x, w, bias)
        # A NaN or infinite value makes a range measured on it not finite. In another range its code hides it.
        if not call.of_a.within.measured_here and (bad := self.layout.bad(plan, a)) is not None:
            y.add_(bad)
        uncoded = self.uncoded(plan.first.axis, a.shape, len(y), y.device)
        if uncoded is not None:
            rounded = plan.second.again(call.b, None, call.of_b, SECOND)
            y.index_copy_(0, uncoded, self.layout.some_output(plan, self.layout.rows(a)[uncoded], rounded, bias))
        out = self.layout.shaped(y, a)
        if added is not None and bias is None:
            out.add_(added)
        return out, None, w.codes if plan.second.saves_more(call.b) else None

    def backward(
        self, plan: Plan, call: Call, g: Tensor, saved: tuple[Tensor | None, Tensor | None], needs: Needs
    ) -> Gradients:
        added = call.added if needs[2] else None
        summed = added is not None and added.ndim == 1 and needs[1]  # a bias's gradient comes with the weight's
        coded = self._coded_operands(plan, call, g, saved[1], values=added is not None and not summed)
        if coded is None:
            return SIMULATED.backward(plan, call, g, saved, needs)
        x, w, codes, rounded = coded
        rows = None if rounded is None else self.layout.rows(rounded)
        of_a = of_b = of_added = None
        if needs[0]:
            errors = codes if rows is None else rows
            assert errors is not None
            of_a = self.layout.shaped(self.layout.errors(errors, w, call.a.shape), call.a)
        if needs[1]:
            of_b, sums = self._of_weight(plan, call, g, rows, codes, x)
            of_added = sums.sum_to_size(added.shape) if added is not None and summed else None
        if added is not None and not summed:
            assert rounded is not None
            of_added = self.layout.added(rounded, added)
        return of_a, of_b, of_added

    def _coded_operands(
        self, plan: Plan, call: Call, g: Tensor, saved: Tensor | None, *, values: bool
    ) -> tuple[Codes, Codes, Codes | None, Tensor | None] | None:
        """The codes of activation, weight and gradient, and the rounded gradient; ``None`` if a range is not finite."""
        if saved is not None and saved.is_floating_point():  # forward had no codes
            return None
        x, w = self._activation(plan.first, call.a, call.of_a), self._weight(call.b, saved, call.of_b)
        gradient = None if x is None or w is None else self._gradient(plan, call, g, values=values)
        return None if x is None or w is None or gradient is None else (x, w, *gradient)

    def _weight(self, w: Tensor, saved: Tensor | None, at: Rounds) -> Codes | None:
        found = coded_compiled(w, *at) if saved is None else (saved, *code_ends_compiled(at.bits, *at.within[:2]))
        if found is None:
            return None
        codes, scale, zero = found
        return Codes(codes if saved is not None else self.layout.columns(codes), scale.flatten(), zero.flatten())

    def _activation(self, factor: Factor, x: Tensor, at: Rounds) -> Codes | None:
        bits = factor.axis.expand(at.bits, x.shape)
        found = coded_compiled(x, bits, at.within)
        return None if found is None else self._with_ends(found[0], bits, *found[1:])

    def _gradient(
        self, plan: Plan, call: Call, g: Tensor, *, values: bool
    ) -> tuple[Codes | None, Tensor | None] | None:
        """The codes of the gradient, if any row has codes, and its values, bit for bit those of the simulation.

        Values may be left out if all rows have codes and ``values`` does not ask for them.
        """
        assert call.bits is not None
        coded = [bits for bits in self.bw if 0 < bits <= GRADIENT_BITS]
        memory = scratch(g, GRADIENT, "matrices")
        if not coded:
            return None, rounded_gradient(plan.fmt, g, call.bits, plan.axis, call.seed, memory)
        bits = self.axis(plan, g).expand(call.bits, g.shape)
        dtype = torch.int16 if max(coded) > CODE_BITS else torch.int8
        if values or any(bw and not both_coded(fw, bw) for fw, bw in self.pairs()):
            rounded = torch.empty_like(g) if memory is None else memory
        else:
            rounded = None
        found = coded_gradient_compiled(g, bits, call.seed, dtype, rounded)
        return None if found is None else (self._with_ends(found[0], bits, *found[1:]), rounded)

    def _with_ends(self, codes: Tensor, bits: Tensor, scale: Tensor, zero: Tensor) -> Codes:
        """Codes as rows, with one scale and zero, with those of each sample, or with those of each row."""
        rows = self.layout.rows(codes)
        if bits.numel() == 1:
            return Codes(rows, scale.view(()), zero.view(()))
        if bits.shape[0] == bits.numel():
            return Codes(rows, scale.flatten(), zero.flatten())
        each = (self.layout.each(ends.view(bits.shape), codes.shape, len(rows)) for ends in (scale, zero))
        return Codes(rows, *each)

    def _of_weight(
        self, plan: Plan, call: Call, g: Tensor, rounded: Tensor | None, codes: Codes | None, x: Codes
    ) -> tuple[Tensor, Tensor]:
        """The gradients of the weight and of a bias: the product of all rows with codes, and those of other rows."""
        found = None if codes is None else self._of_codes(plan, call, g, codes, x)
        for coded, rows in self.in_float(plan, call, g, len(x.codes)):
            assert rounded is not None
            values = _values(x, rows) if coded else select_rows(self.layout.rows(call.a), rows)
            part = self.layout.some_weight(plan, select_rows(rounded, rows), values, call.b)
            found = part if found is None else (found[0].add_(part[0]), found[1].add_(part[1]))
        if found is None:
            return g.new_zeros(call.b.shape), g.new_zeros(len(self.layout.columns(call.b)))
        return found

    def _of_codes(self, plan: Plan, call: Call, g: Tensor, codes: Codes, x: Codes) -> tuple[Tensor, Tensor] | None:
        """The contribution of the rows whose activation and gradient both have codes."""
        pairs = self.pairs()
        if not any(both_coded(fw, bw) for fw, bw in pairs):
            return None
        left_out = [bw != 0 and not both_coded(fw, bw) for fw, bw in pairs]
        if any(left_out):  # rows of 0 bits have scale 0 already
            rows = self.by_row(plan, call, g, torch.tensor(left_out), len(codes.codes))
            codes = codes._replace(scale=spread(codes.scale, len(rows)).masked_fill(rows, 0))
        return self.layout.weight(codes, x, call.b)


def _values(matrix: Codes, rows: Tensor | None) -> Tensor:
    """The values of some rows, which share one scale, or of all."""
    ends: Sequence[Tensor] = matrix.scale, matrix.zero
    if matrix.scale.ndim:
        ends = [select_rows(spread(each, len(matrix.codes)), rows)[0] for each in ends]
    return select_rows(matrix.codes, rows) * ends[0] + ends[1]
