"""The choice, call by call, whether a fused op runs on integer codes or in float."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fractrain_fx.config import CODE_BITS
from fractrain_fx.config.precision import FLOAT_BITS
from fractrain_fx.execution.codes.half_types import HALF_TYPES, HalfPrecision
from fractrain_fx.execution.codes.layout import Layout
from fractrain_fx.execution.codes.product import Coded
from fractrain_fx.execution.codes.rows import has_codes
from fractrain_fx.execution.codes.timing import Tuner
from fractrain_fx.execution.simulated.arithmetic import Needs
from fractrain_fx.execution.simulated.strategy import SIMULATED, Call, Plan, Strategy, autocast_dtype
from fractrain_fx.formats.scratch import Order
from fractrain_fx.nn.batch_axis import BatchAxis

__all__ = ["Int8Choice", "needs_of"]


class _Kind(NamedTuple):
    """Everything that the time of the int8 form and of the float form depends on.

    Attributes:
        layout: how the contraction is one product of matrices.
        rows: rows of the output, rounded up to a power of two.
        outputs, inner: output channels, and values in a row of the activation.
        gated: whether samples have bits of their own.
        widths: bits of activation, weight and gradient: the kernels take less time for fewer. Bits that samples choose
            are not told apart, because they may change in each step.
        needs: which gradients are asked for.
        order: the order in memory of the rounded activation in float.
        dtype: type of the result.
    """

    layout: Layout
    rows: int
    outputs: int
    inner: int
    gated: bool
    widths: tuple[int, int, int]
    needs: Needs
    order: Order
    dtype: torch.dtype


class Int8Choice:
    """Makes a fused op run on integers if it can and if that takes less time.

    Args:
        name: the op's name.
        layout: how the op is one product of matrices.
        tuner: the model's tuner.

    Attributes:
        kernel: the form that ran last: ``int8``; ``float``, which took less time; or the reason why the op cannot run
            on integers. ``not yet timed`` before the op trained.
    """

    def __init__(self, name: str, layout: Layout, tuner: Tuner) -> None:
        self.name, self.layout, self.tuner = name, layout, tuner
        self.kernel = "not yet timed"

    def __repr__(self) -> str:
        """What a compiled graph depends on: ops that only differ in name and timings share one."""
        return f"{type(self).__name__}({self.layout!r})"

    def strategy(self, plan: Plan, call: Call, needs: Needs | None = None) -> Strategy:
        """How to compute a call. Evaluation uses the form that training used last, if the call has that form.

        Args:
            plan: the op's plan.
            call: the tensors.
            needs: which gradients will be asked for, if the tensors do not tell.
        """
        coded = self._coded(plan, call)
        training = call.bits is not None
        if isinstance(coded, str):
            if training:
                self.kernel = coded
            return SIMULATED
        dtype, needs = _result_type(call), needs_of(call) if needs is None else needs
        strategy: Strategy = coded if dtype == torch.float32 else HalfPrecision(coded, dtype)
        if not training:
            return strategy if self.kernel == "int8" or self.tuner.kernels == "int8" else SIMULATED
        int8 = self.tuner.int8(
            self._kind(call, coded, needs, plan.order(call.a, call.b), dtype),
            self.name,
            lambda each: _run(plan, call, strategy if each else SIMULATED, needs),
        )
        self.kernel = "int8" if int8 else "float"
        return strategy if int8 else SIMULATED

    def _coded(self, plan: Plan, call: Call) -> Coded | str:
        """The form on integers, or the reason why this call has none."""
        types = {x.dtype for x in (call.a, call.b, call.added) if x is not None}
        device = call.a.device
        if not (call.a.numel() and call.b.numel()) or device.type == "meta":
            return "has no values"
        if (reason := self.tuner.lacks(device)) is not None:
            return reason
        if (other := next(iter(types - {torch.float32, *HALF_TYPES}), None)) is not None:
            return f"computes in {other}"
        if len(types) > 1 and autocast_dtype(device.type) is None:
            return f"its operands have {len(types)} types"
        if call.bits is None and torch.is_grad_enabled():
            return "evaluates with gradients"
        fw, w = _widths(call.of_a.bits), _widths(call.of_b.bits)
        bw = () if call.bits is None else _widths(call.bits)
        if not all(map(has_codes, w)) or not any(map(has_codes, fw)):
            return f"operands of {fw[0]} and {w[0]} bits have no 8-bit codes"
        if not all(has_codes(bits) or bits in (0, FLOAT_BITS) for bits in fw):
            return f"an activation of {max(set(fw) - {FLOAT_BITS})} bits has no 8-bit codes"
        if len(bw) > 1 and 1 < len(fw) != len(bw):
            return "its output has other samples than its input"
        samples: list[BatchAxis] = [plan.first.axis] * (len(fw) > 1) + [plan.axis] * (len(bw) > 1)
        reason = self.layout.refuses(call.a.shape, call.b.shape, samples)
        return Coded(self.layout, fw, bw) if reason is None else reason

    def _kind(self, call: Call, coded: Coded, needs: Needs, order: Order, dtype: torch.dtype) -> _Kind:
        columns = self.layout.columns(call.b)
        outputs, inner = len(columns), columns[0].numel()
        gated = len(coded.fw) > 1 or len(coded.bw) > 1
        widths = CODE_BITS, CODE_BITS, 2 * CODE_BITS if max(coded.bw) > CODE_BITS else CODE_BITS
        if not gated:
            widths = coded.fw[0], max(_widths(call.of_b.bits)), coded.bw[0]
        return _Kind(
            self.layout,
            1 << (call.a.numel() // inner - 1).bit_length(),
            outputs,
            inner,
            gated,
            widths,
            needs,
            order,
            dtype,
        )


def _result_type(call: Call) -> torch.dtype:
    return autocast_dtype(call.a.device.type) or call.a.dtype


def needs_of(call: Call) -> Needs:
    """Which gradients a call will be asked for."""
    return call.a.requires_grad, call.b.requires_grad, call.added is not None and call.added.requires_grad


def _run(plan: Plan, call: Call, strategy: Strategy, needs: Needs) -> None:
    """Run all products of a call, with the output in place of its gradient."""
    with torch.no_grad():
        out, *saved = strategy.forward(plan, call)
        strategy.backward(plan, call, out, (saved[0], saved[1]), needs)


def _widths(bits: Tensor) -> tuple[int, ...]:
    """One width, or one for each sample."""
    return tuple(bits.flatten().tolist())
