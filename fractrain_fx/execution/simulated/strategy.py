"""How a fused op multiplies: rounds its operands, contracts them, and in backward contracts the rounded gradient."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fractrain_fx.execution.simulated.arithmetic import Arithmetic, Bound, Gradients, Needs
from fractrain_fx.execution.simulated.operand import Factor, Rounds
from fractrain_fx.execution.simulated.short_path import has_all_kernels, round_factor, round_gradient
from fractrain_fx.formats import Format, ValueRange
from fractrain_fx.formats.scratch import Order, scratch
from fractrain_fx.nn.batch_axis import BatchAxis
from fractrain_fx.nn.rounding import rounded_gradient

__all__ = [
    "CALL_TENSORS",
    "FIRST",
    "GRADIENT",
    "SECOND",
    "SIMULATED",
    "Call",
    "Plan",
    "Simulated",
    "Strategy",
    "autocast",
    "autocast_dtype",
    "autocasting",
    "contract",
    "convolves_channels_last",
    "with_channels_last",
]

# Slots of scratch memory in which the rounded operands of the current op lie.
FIRST, SECOND, GRADIENT = range(3)


@dataclass(frozen=True)
class Plan:
    """Everything about a fused op except its tensors: how both factors and the output's gradient are rounded.

    Attributes:
        arithmetic: the contraction.
        static: its arguments that are not tensors.
        first, second: how its factors are rounded.
        fmt: the format of the output's gradient.
        axis: where the samples lie in the output.
        channels_last: whether it is a convolution that may compute with the channels innermost in memory; ``None``
            before the pass ``ChannelsLast`` has looked.
    """

    arithmetic: Arithmetic
    static: tuple[Any, ...]
    first: Factor
    second: Factor
    fmt: Format
    axis: BatchAxis
    channels_last: bool | None = None

    def order(self, a: Tensor, b: Tensor) -> Order:
        """The order in memory of the rounded activation and gradient; ``a`` is the activation, ``b`` the weight.

        torch's convolutions transpose an activation that lies otherwise, and so do the layers behind them. A weight
        that is larger than the activation decides instead: its gradient comes in the activation's order, and
        is transposed into the weight's.
        """
        if not self.channels_last or not convolves_channels_last(a):
            return self.arithmetic.order
        weight = self.second.frozen is None and b.is_contiguous() and b.numel() > a.numel()
        return "plain" if weight else "channels last"

    @cached_property
    def by_kernels(self) -> bool:
        """Whether C++ kernels round both factors and the gradient."""
        return has_all_kernels(self.first, self.second, self.fmt)


class Call(NamedTuple):
    """The tensors of a call.

    Attributes:
        a, b: both factors, unrounded.
        added: the term that is added to the product.
        of_a, of_b: how the factors are rounded.
        bits, seed: bits of the gradient and seed of its noise; ``bits`` is ``None`` in evaluation.
    """

    a: Any
    b: Any
    added: Tensor | None
    of_a: Rounds
    of_b: Rounds
    bits: Tensor | None
    seed: Tensor | None

    def flatten(self) -> tuple[list[Tensor | None], tuple[bool, bool]]:
        """All tensors, and for both factors whether the range was measured on it: arguments that an op can take."""
        tensors = [self.a, self.b, self.added]
        for bits, within in (self.of_a, self.of_b):
            tensors += [bits, within.lo, within.span]
        return [*tensors, self.bits, self.seed], (self.of_a.within.measured_here, self.of_b.within.measured_here)

    @staticmethod
    def unflatten(tensors: Sequence[Tensor | None], measured_here: Sequence[bool]) -> Call:
        """The call from the results of :meth:`flatten`."""
        a, b, added, *rounds, bits, seed = tensors
        of_a, of_b = (
            Rounds(rounds[i], ValueRange(rounds[i + 1], rounds[i + 2], measured))  # type: ignore[arg-type]
            for i, measured in zip((0, 3), measured_here, strict=True)
        )
        return Call(a, b, added, of_a, of_b, bits, seed)


CALL_TENSORS = 11
"""The number of tensors that :meth:`Call.flatten` gives."""

Contracted = tuple[Tensor, Tensor | None, Tensor | None]
"""The product, and the tensors that are saved of the first and of the second factor besides the operands."""


class Strategy(Protocol):
    """One way to compute a fused op. All give the same numbers, up to the order of sums."""

    def forward(self, plan: Plan, call: Call) -> Contracted:
        """The contraction of the rounded factors."""
        ...

    def backward(
        self, plan: Plan, call: Call, g: Tensor, saved: tuple[Tensor | None, Tensor | None], needs: Needs
    ) -> Gradients:
        """Gradients of both rounded factors and of the added term, if ``needs`` asks for them, from the output's."""
        ...


class Simulated:
    """Multiplies rounded values in float."""

    def forward(self, plan: Plan, call: Call) -> Contracted:
        order = plan.order(call.a, call.b)
        if (factors := _factors_by_kernels(plan, call, order)) is not None:
            return plan.arithmetic.forward(Bound(*factors, call.added, plan.static)), None, None
        first, of_first = plan.first.take(call.a, call.of_a, FIRST, order)
        second, of_second = plan.second.take(call.b, call.of_b, SECOND)
        return contract(plan, call, first, second), of_first, of_second

    def backward(
        self, plan: Plan, call: Call, g: Tensor, saved: tuple[Tensor | None, Tensor | None], needs: Needs
    ) -> Gradients:
        order = plan.order(call.a, call.b)
        anew = saved[0] is None and saved[1] is None
        if call.bits is not None and anew and (factors := _factors_by_kernels(plan, call, order)) is not None:
            rounded = round_gradient(plan.fmt, g, call.bits, plan.axis, call.seed, GRADIENT, order)
            if rounded is not None:
                return plan.arithmetic.backward(rounded, Bound(*factors, call.added, plan.static), needs)
        if call.bits is not None:
            out = scratch(g, GRADIENT, order)
            g = rounded_gradient(plan.fmt, g, call.bits, plan.axis, call.seed, out)
        # Under autocast the product was computed in a half type, and so are its gradients.
        first = plan.first.again(call.a, saved[0], call.of_a, FIRST, order).to(g.dtype)
        second = plan.second.again(call.b, saved[1], call.of_b, SECOND).to(g.dtype)
        return plan.arithmetic.backward(g, Bound(first, second, call.added, plan.static), needs)


SIMULATED = Simulated()


def _factors_by_kernels(plan: Plan, call: Call, order: Order) -> tuple[Tensor, Tensor] | None:
    """Both rounded factors; ``None`` if C++ kernels cannot round both."""
    if torch.compiler.is_compiling() or not plan.by_kernels or torch.is_autocast_enabled("cpu"):
        return None
    first = round_factor(plan.first, call.a, call.of_a, FIRST, order)
    if first is None:
        return None
    second = round_factor(plan.second, call.b, call.of_b, SECOND)
    return None if second is None else (first, second)


def convolves_channels_last(x: Tensor) -> bool:
    """Whether a convolution of images is quicker with the channels innermost in memory.

    oneDNN then transposes nothing. One place or one channel has no order. In graphs that ``torch.compile`` makes, the
    compiler chooses.
    """
    if torch.compiler.is_compiling() or not x.is_cpu:
        return False
    if not torch.backends.mkldnn.enabled or not torch.backends.mkldnn.is_available():
        return False
    return x.ndim == 4 and x.shape[1] > 1 and x.shape[2] * x.shape[3] > 1


def with_channels_last(x: Tensor) -> Tensor:
    """``x`` with the channels innermost in memory, if a convolution is quicker so."""
    return x.contiguous(memory_format=torch.channels_last) if convolves_channels_last(x) else x


def contract(plan: Plan, call: Call, first: Tensor, second: Tensor) -> Tensor:
    """The contraction of the rounded factors of a call, in the type that autocast sets if it is on."""
    added, device = call.added, call.a.device.type
    dtype = autocast_dtype(device)
    if dtype is None:  # entering torch.autocast takes as long as a small op
        return plan.arithmetic.forward(Bound(first, second, added, plan.static))
    first, second, added = (autocast(each, dtype) for each in (first, second, added))
    with torch.autocast(device, enabled=False):
        return plan.arithmetic.forward(Bound(first, second, added, plan.static))


def _has_autocast(device: str) -> bool:
    """Whether a type of device has autocast; the compiler of torch 2.11 runs this and cannot compile it."""
    return torch.amp.is_autocast_available(device)


# The same as `torch.compiler.assume_constant_result`, which would import the compiler here.
_has_autocast._dynamo_marked_constant = True  # type: ignore[attr-defined]


def autocast_dtype(device: str) -> torch.dtype | None:
    """The type that autocast sets on a type of device; ``None`` if it is off, or if the device has none (meta)."""
    on = _has_autocast(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else None


def autocasting(device: str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Autocast as it was when :func:`autocast_dtype` gave ``dtype``, also in a backward pass under another."""
    if not _has_autocast(device):
        return nullcontext()
    return torch.autocast(device, dtype, enabled=dtype is not None)


def autocast(x: Any, dtype: torch.dtype) -> Any:
    """Cast an argument of a product as autocast does."""
    return x.to(dtype) if isinstance(x, Tensor) and x.dtype != torch.float64 else x
