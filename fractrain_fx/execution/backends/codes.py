"""C++ kernels multiply the integer codes of format ``affine`` on a CPU, with the numbers of products in float.

Rows without codes are multiplied in float beside the others. These are the rows of samples whose activation is not
rounded (0 or 32 bits) and, for the gradient of the weight, of samples whose gradient has more bits than a code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fractrain_fx.config import CODE_BITS
from fractrain_fx.execution.arithmetic import Gradients, Needs
from fractrain_fx.execution.autocast import autocast_dtype
from fractrain_fx.execution.backends.plain import PLAIN
from fractrain_fx.execution.codes.encode import encode_activation, encode_gradient, encode_weight, values_of
from fractrain_fx.execution.codes.layout import Codes, Layout
from fractrain_fx.execution.codes.rows import RowBits, both_coded, select_rows, widths
from fractrain_fx.execution.codes.timing import TimingKey, Tuner
from fractrain_fx.execution.plan import Backend, Call, Computed, Kept, Plan
from fractrain_fx.execution.rounded import SECOND, is_small, round_again

__all__ = ["CodedProducts"]

_HALF_TYPES = {torch.bfloat16, torch.float16}


class CodedProducts:
    """Multiplies codes if an op can, and if that takes less time than in float.

    Under autocast and in half types operands are widened, and the output is given in the half type. The plain backend
    rounds its values to that type before it multiplies, so these results are nearer to those of float32.

    Args:
        op: the op's name.
        layout: how the op is a product of rows.
        tuner: the model's tuner.

    Attributes:
        kernel: the form that ran last: ``int8``; ``float``, which took less time; or the reason why the op cannot run
            on codes. ``not yet timed`` before the op trained.
    """

    name = "codes"

    def __init__(self, op: str, layout: Layout, tuner: Tuner) -> None:
        self.op, self.layout, self.tuner = op, layout, tuner
        self.kernel = "not yet timed"

    def __repr__(self) -> str:
        """What a compiled graph depends on: ops that only differ in name and timings share one."""
        return f"{type(self).__name__}({self.layout!r})"

    def refuses(self, plan: Plan, call: Call, needs: Needs) -> str | None:
        """Evaluation uses the form that training used last, if the call has that form."""
        reason = self._has_no_codes(plan, call)
        if call.bits is None:
            chosen = self.kernel == "int8" or self.tuner.always
            return reason if reason is not None or chosen else "did not multiply codes when it trained last"
        if reason is None and not self._is_quicker(plan, call, needs):
            self.kernel = "float"
            return "takes less time in float"
        self.kernel = "int8" if reason is None else reason
        return reason

    def forward(self, plan: Plan, call: Call) -> Computed:
        dtype = _result_type(call)
        if dtype != torch.float32:
            with torch.autocast(call.a.device.type, enabled=False):
                out, kept = self._forward(plan, _widened(call))
            return out.to(dtype), kept
        return self._forward(plan, call)

    def _forward(self, plan: Plan, call: Call) -> Computed:
        a, added, bits = call.a, call.added, self._bits(call)
        within = call.of_b.within or plan.second.fmt.weight_range(call.b.detach(), dim=plan.second.channel)
        x, w = encode_activation(self.layout, plan, call), encode_weight(self.layout, call, within, None)
        if x is None or w is None:  # a range is not finite
            return PLAIN.forward(plan, call)
        bias = added if added is not None and added.ndim == 1 else None
        y = self.layout.output(x, w, bias)
        # A NaN or infinite value makes a range measured on it not finite. In another range its code hides it.
        assert call.of_a.within is not None
        if not call.of_a.within.measured_here and (bad := self.layout.bad(plan, a)) is not None:
            y.add_(bad)
        uncoded = bits.uncoded(plan.first.axis, a.shape, len(y), y.device)
        if uncoded is not None:
            rounded = round_again(plan.second, call.b, call.of_b, Kept(None, within), SECOND)
            y.index_copy_(0, uncoded, self.layout.some_output(plan, self.layout.rows(a)[uncoded], rounded, bias))
        out = self.layout.shaped(y, a)
        if added is not None and bias is None:
            out.add_(added)
        return out, (Kept(), Kept(w.codes if is_small(call.b) else None, within))

    def backward(self, plan: Plan, call: Call, g: Tensor, kept: tuple[Kept, Kept], needs: Needs) -> Gradients:
        if _result_type(call) != torch.float32 or g.dtype != torch.float32:
            with torch.autocast(g.device.type, enabled=False):
                return self._backward(plan, _widened(call), g.float(), kept, needs)
        return self._backward(plan, call, g, kept, needs)

    def _backward(self, plan: Plan, call: Call, g: Tensor, kept: tuple[Kept, Kept], needs: Needs) -> Gradients:
        added = call.added if needs[2] else None
        summed = added is not None and added.ndim == 1 and needs[1]  # a bias's gradient comes with the weight's
        bits, within = self._bits(call), call.of_b.within or kept[1].within
        x, w = encode_activation(self.layout, plan, call), encode_weight(self.layout, call, within, kept[1].values)
        if x is None or w is None:  # a range is not finite, so that forward was in float
            return PLAIN.backward(plan, call, g, kept, needs)
        gradient = encode_gradient(bits, plan, call, g, values=added is not None and not summed)
        if gradient is None:  # its range is not finite, or too wide; the kept values are codes
            return PLAIN.backward(plan, call, g, (kept[0], kept[1]._replace(values=None)), needs)
        codes, rounded = gradient
        rows = None if rounded is None else self.layout.rows(rounded)
        of_a = of_b = of_added = None
        if needs[0]:
            errors = codes if rows is None else rows
            assert errors is not None
            of_a = self.layout.shaped(self.layout.errors(errors, w, call.a.shape), call.a)
        if needs[1]:
            of_b, sums = self._of_weight(plan, call, g, bits, x, codes, rows)
            of_added = sums.sum_to_size(added.shape) if added is not None and summed else None
        if added is not None and not summed:
            assert rounded is not None
            of_added = self.layout.added(rounded, added)
        return of_a, of_b, of_added

    def _of_weight(
        self, plan: Plan, call: Call, g: Tensor, bits: RowBits, x: Codes, codes: Codes | None, rounded: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The gradients of the weight and of a bias: the product of all rows with codes, and those of other rows."""
        gradients = None
        if codes is not None and any(both_coded(fw, bw) for fw, bw in bits.pairs()):
            gradients = self.layout.weight(bits.without_others(plan, call, g, codes), x, call.b)
        for coded, rows in bits.in_float(plan, call, g, len(x.codes)):
            assert rounded is not None
            values = values_of(x, rows) if coded else select_rows(self.layout.rows(call.a), rows)
            part = self.layout.some_weight(plan, select_rows(rounded, rows), values, call.b)
            gradients = part if gradients is None else (gradients[0].add_(part[0]), gradients[1].add_(part[1]))
        return gradients or (g.new_zeros(call.b.shape), g.new_zeros(len(self.layout.columns(call.b))))

    def _bits(self, call: Call) -> RowBits:
        return RowBits(self.layout, widths(call.of_a.bits), () if call.bits is None else widths(call.bits))

    def _has_no_codes(self, plan: Plan, call: Call) -> str | None:
        if not (call.a.numel() and call.b.numel()) or call.a.is_meta:
            return "has no values"
        if (reason := self.tuner.lacks(call.a.device)) is not None:
            return reason
        if plan.second.frozen is not None:
            return "its frozen weight is kept as codes, which are read as floats"
        types = {x.dtype for x in (call.a, call.b, call.added) if x is not None}
        if (other := next(iter(types - {torch.float32, *_HALF_TYPES}), None)) is not None:
            return f"computes in {other}"
        if len(types) > 1 and autocast_dtype(call.a.device.type) is None:
            return f"its operands have {len(types)} types"
        if call.bits is None and torch.is_grad_enabled():
            return "evaluates with gradients"
        return self._bits(call).refuses(plan, call)

    def _is_quicker(self, plan: Plan, call: Call, needs: Needs) -> bool:
        bits, outputs = self._bits(call), self.layout.columns(call.b)
        gated = len(bits.fw) > 1 or len(bits.bw) > 1
        few = CODE_BITS, CODE_BITS, 2 * CODE_BITS if max(bits.bw) > CODE_BITS else CODE_BITS
        inner = outputs[0].numel()
        key = TimingKey(
            layout=self.layout,
            rows=1 << (call.a.numel() // inner - 1).bit_length(),
            outputs=len(outputs),
            inner=inner,
            gated=gated,
            widths=few if gated else (bits.fw[0], max(widths(call.of_b.bits)), bits.bw[0]),
            needs=needs,
            order=plan.order(call.a, call.b),
            dtype=_result_type(call),
        )

        def run(codes: bool) -> None:
            """All products of the call, with the output in place of its gradient."""
            backend: Backend = self if codes else PLAIN
            with torch.no_grad():
                out, kept = backend.forward(plan, call)
                backend.backward(plan, call, out, kept, needs)

        return self.tuner.int8(key, self.op, run)


def _result_type(call: Call) -> torch.dtype:
    return autocast_dtype(call.a.device.type) or call.a.dtype


def _widened(call: Call) -> Call:
    a, b, added = (None if x is None else x.float() for x in (call.a, call.b, call.added))
    return call._replace(a=a, b=b, added=added)
