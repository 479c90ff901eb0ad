"""A fused op without its tensors, one call of it, and what a backend is: one way to compute the op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fractrain_fx.config import Precision
from fractrain_fx.config.gate import GateGradient
from fractrain_fx.execution.arithmetic import Arithmetic, Bound, Gradients, Needs
from fractrain_fx.execution.autocast import autocast, autocast_dtype
from fractrain_fx.formats import Format, ValueRange
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.formats.scratch import Order
from fractrain_fx.nn.frozen_weight import FrozenWeight
from fractrain_fx.nn.quantizers import ActivationQuantizer, GradientQuantizer, WeightQuantizer
from fractrain_fx.nn.rounding import gate_gradient

__all__ = [
    "CALL_TENSORS",
    "NOTHING_KEPT",
    "Backend",
    "Call",
    "Computed",
    "Factor",
    "Kept",
    "Plan",
    "Rounds",
    "contract",
    "convolves_channels_last",
    "factor",
    "range_of",
    "with_channels_last",
]


class Rounds(NamedTuple):
    """How a factor is rounded in this step: its bits and its range.

    A backend measures a weight itself, so that the range of a weight is ``None`` (but for one that is kept as codes).
    """

    bits: Tensor
    within: ValueRange | None


@dataclass(frozen=True)
class Factor:
    """A weight, rounded channel by channel, or an activation.

    Attributes:
        fmt: the number format.
        widths: forward bits of each option, if samples choose among options.
        axis: where the samples lie.
        order: the order in memory in which its product reads it quickest.
        weight: whether it is a weight.
        channel: the dimension of a weight that holds the output channels.
        quantizer: of a weight, which may have it as codes.
        estimate: how the gradient of the samples' choices is estimated.
    """

    fmt: Format
    widths: tuple[int, ...]
    axis: BatchAxis
    order: Order
    weight: bool = False
    channel: int | None = None
    quantizer: WeightQuantizer | None = None
    estimate: GateGradient = "straight-through"

    @property
    def frozen(self) -> FrozenWeight | None:
        """The codes of a frozen weight. They replace it, and are read anew for each product."""
        return None if self.quantizer is None else self.quantizer.frozen

    def gradient(self, x: Tensor, g: Tensor, bits: Tensor) -> Tensor:
        """The gradient of the factor from ``g``, that of the rounded factor."""
        if self.weight:
            return self.fmt.weight_gradient(x, g, bits)
        return self.fmt.activation_gradient(x, g, self.axis.expand(bits, x.shape))

    def of_choice(self, x: Tensor, g: Tensor, rounds: Rounds) -> Tensor:
        """The gradient of every option of every sample."""
        assert rounds.within is not None
        x = x.to(torch.promote_types(x.dtype, g.dtype))  # products of codes give float32 gradients for half types
        return gate_gradient(self.fmt, x, g, self.widths, self.axis, rounds.within, len(rounds.bits), self.estimate)


def factor(quantizer: ActivationQuantizer | WeightQuantizer, order: Order) -> Factor:
    """The factor that a quantizer rounds."""
    if isinstance(quantizer, WeightQuantizer):
        return Factor(quantizer.fmt, (), BatchAxis(), order, True, quantizer.dim, quantizer)
    return Factor(quantizer.fmt, quantizer.widths, quantizer.axis, order, estimate=quantizer.estimate)


@dataclass(frozen=True)
class Plan:
    """Everything about a fused op except its tensors: how both factors and the output's gradient are rounded.

    Attributes:
        arithmetic: the contraction.
        static: its arguments that are not tensors.
        first, second: how its factors are rounded.
        fmt: the format of the output's gradient.
        axis: where the samples lie in the output.
        gradient: sees the output's gradient before it is rounded.
        channels_last: whether it is a convolution that may compute with the channels innermost in memory; ``None``
            before the pass ``ChannelsLast`` has looked.
    """

    arithmetic: Arithmetic
    static: tuple[Any, ...]
    first: Factor
    second: Factor
    fmt: Format
    axis: BatchAxis
    gradient: GradientQuantizer | None = None
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

    def has_kernels(self, device: str) -> bool:
        """Whether kernels for a type of device round both factors and the gradient in format ``affine``."""
        return all(fmt.has_codes and device in fmt.kernels for fmt in (self.fmt, self.first.fmt, self.second.fmt))


class Call(NamedTuple):
    """The tensors of a call.

    Attributes:
        a, b: both factors, unrounded.
        added: the term that is added to the product.
        of_a, of_b: how the factors are rounded.
        bits, seed: bits of the gradient and seed of its noise; ``bits`` is ``None`` in evaluation.
        precision: the bits as the host knows them, for a backend that has a kernel for each width; else ``None``.
    """

    a: Any
    b: Any
    added: Tensor | None
    of_a: Rounds
    of_b: Rounds
    bits: Tensor | None
    seed: Tensor | None
    precision: Precision | None = None

    def flatten(self) -> tuple[list[Tensor | None], tuple[bool, bool]]:
        """All tensors, and for both factors whether the range was measured on it: arguments that an op can take.

        The precision is not among them.
        """
        tensors, measured = [self.a, self.b, self.added], []
        for bits, within in (self.of_a, self.of_b):
            tensors += [bits, None, None] if within is None else [bits, within.lo, within.span]
            measured.append(within is not None and within.measured_here)
        return [*tensors, self.bits, self.seed], (measured[0], measured[1])

    @staticmethod
    def unflatten(
        tensors: Sequence[Tensor | None], measured_here: Sequence[bool], precision: Precision | None = None
    ) -> Call:
        """The call from the results of :meth:`flatten` and its precision."""
        a, b, added, a_bits, a_lo, a_span, b_bits, b_lo, b_span, bits, seed = tensors
        assert a_bits is not None and b_bits is not None
        of_a = Rounds(a_bits, range_of(a_lo, a_span, measured_here[0]))
        of_b = Rounds(b_bits, range_of(b_lo, b_span, measured_here[1]))
        return Call(a, b, added, of_a, of_b, bits, seed, precision)


CALL_TENSORS = 11
"""The number of tensors that :meth:`Call.flatten` gives."""


def range_of(lo: Tensor | None, span: Tensor | None, measured_here: bool) -> ValueRange | None:
    """A range from its parts; ``None`` without them."""
    return None if lo is None or span is None else ValueRange(lo, span, measured_here)


class Kept(NamedTuple):
    """What a backend keeps of a factor between forward and backward, besides the operand itself.

    Attributes:
        values: its rounded values or codes.
        within: the range that was measured on it.
    """

    values: Tensor | None = None
    within: ValueRange | None = None


NOTHING_KEPT = Kept(), Kept()

Computed = tuple[Tensor, tuple[Kept, Kept]]
"""The output, and what is kept of both factors."""


class Backend(Protocol):
    """One way to compute a fused op. All give the same numbers, up to the order of sums.

    Attributes:
        name: names it in tables.
    """

    name: str

    def refuses(self, plan: Plan, call: Call, needs: Needs) -> str | None:
        """The reason why it does not compute a call; ``None`` if it does. ``needs``: the gradients to be asked for."""
        ...

    def forward(self, plan: Plan, call: Call) -> Computed:
        """Measure, round, multiply."""
        ...

    def backward(self, plan: Plan, call: Call, g: Tensor, kept: tuple[Kept, Kept], needs: Needs) -> Gradients:
        """Round the output's gradient ``g``, and multiply it by both factors.

        Returns:
            The gradients of both rounded factors and of the added term, if ``needs`` asks for them.
        """
        ...


def contract(plan: Plan, call: Call, first: Tensor, second: Tensor) -> Tensor:
    """The contraction of the rounded factors of a call, in the type that autocast sets if it is on."""
    added, device = call.added, call.a.device.type
    dtype = autocast_dtype(device)
    if dtype is None:  # entering torch.autocast takes as long as a small op
        return plan.arithmetic.forward(Bound(first, second, added, plan.static))
    first, second, added = (autocast(tensor, dtype) for tensor in (first, second, added))
    with torch.autocast(device, enabled=False):
        return plan.arithmetic.forward(Bound(first, second, added, plan.static))


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
