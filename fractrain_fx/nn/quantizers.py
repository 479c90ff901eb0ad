"""The modules that quantize the operands of an op: activation, weight and output gradient.

Bits come along graph edges as tensors, never as attributes, so a new precision never changes the graph. Gated
quantizers (``Mixed``) take the choice of each sample, a one-hot row over the options, and give each its own bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fractrain_fx.config.gate import GateGradient
from fractrain_fx.formats import Format, ValueRange
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.formats.bits import rounding
from fractrain_fx.formats.scratch import Latest
from fractrain_fx.nn.frozen_weight import FrozenWeight
from fractrain_fx.nn.ranges import RunningRange
from fractrain_fx.nn.rounding import gate_gradient, gradients_unrounded, refuse_create_graph, rounded_gradient

__all__ = [
    "ActivationQuantizer",
    "GradientQuantizer",
    "MixedActivationQuantizer",
    "MixedGradientQuantizer",
    "WeightQuantizer",
    "picked",
]

# The bits of the latest block's samples.
_latest_forward, _latest_backward = Latest(), Latest()


class ActivationQuantizer(nn.Module):
    """Rounds an activation to ``bits``, over the batch's range in training and the running range in evaluation.

    ``keep`` is the share of the old running range that a training step keeps.
    """

    def __init__(self, fmt: Format, keep: float = 0.9, axis: BatchAxis | None = None) -> None:
        super().__init__()
        self.fmt = fmt
        self.axis = axis or BatchAxis()
        self.range = RunningRange(fmt, keep, self.axis)
        self.widths: tuple[int, ...] = ()
        self.estimate: GateGradient = "straight-through"

    def forward(self, x: Float[Tensor, "*dims"], bits: Int[Tensor, ""]) -> Float[Tensor, "*dims"]:
        bits, choice = self.bits_of(bits), self.choice_of(bits)
        rounded: Tensor = _RoundActivation.apply(
            x, bits, choice, *self.range(x), self.fmt, self.widths, self.axis, self.estimate
        )
        return rounded

    def bits_of(self, control: Tensor) -> Int[Tensor, "*samples"]:
        """The bits of all values, or those of each sample.

        ``control`` is a width here. For gated quantizers it is a choice, or the result of :func:`picked` for one.
        """
        return control

    def choice_of(self, control: Tensor) -> Float[Tensor, "batch options"] | None:
        """The choice that gets a gradient from this rounding, or ``None``."""
        return None


class MixedActivationQuantizer(ActivationQuantizer):
    """Rounds each sample of an activation to the forward bits of its own option, all in one range (paper 3.2).

    The gradient of ``choice[i, k]`` is the sum over sample ``i`` of upstream * (Q_k(x) - x), for every option ``k``,
    taken or not; it is 0 if the option has 0 or 32 bits. With ``fisher`` it is that of the squares, times half the
    number of samples (:func:`fractrain_fx.nn.rounding.gate_gradient`).
    """

    options: Tensor

    def __init__(
        self,
        fmt: Format,
        options: Sequence[int],
        axis: BatchAxis,
        keep: float = 0.9,
        estimate: GateGradient = "straight-through",
    ) -> None:
        super().__init__(fmt, keep, axis)
        self.widths = tuple(options)
        self.estimate = estimate
        self.register_buffer("options", torch.tensor(self.widths), persistent=False)

    def bits_of(self, control: Tensor) -> Int[Tensor, " batch"]:
        return _bits_of_samples(self.options, self.widths, control, _latest_forward)

    def choice_of(self, control: Tensor) -> Float[Tensor, "batch options"] | None:
        return control if control.requires_grad and rounding(self.widths) else None


class WeightQuantizer(nn.Module):
    """Rounds a weight to ``bits``, over one range for each output channel; the master weight stays float.

    ``dim`` holds the output channels; ``None`` is for a vector, which is one channel. ``frozen`` has the codes of a
    frozen weight, which replace it (``FracModel.pack_frozen``).
    """

    frozen: FrozenWeight | None

    def __init__(self, fmt: Format, dim: int | None) -> None:
        super().__init__()
        self.fmt = fmt
        self.dim = dim
        self.register_module("frozen", None)

    def forward(self, w: Float[Tensor, "*dims"], bits: Int[Tensor, ""]) -> Float[Tensor, "*dims"]:
        if self.frozen is not None:
            return self.frozen.values(w)
        rounded: Tensor = _RoundWeight.apply(w, bits, self.fmt, self.dim)
        return rounded


class GradientQuantizer(nn.Module):
    """Leaves an op's output as it is, and rounds the gradient that comes back to it to ``bits``.

    ``axis`` is where samples lie, for formats that scale each by itself. ``stream`` is the op's own number, so that no
    two ops of a step have the same noise.
    """

    stream_on_device: Tensor

    def __init__(self, fmt: Format, axis: BatchAxis | None = None, stream: int = 0) -> None:
        super().__init__()
        self.fmt = fmt
        self.axis = axis or BatchAxis()
        self.stream = stream
        self.register_buffer("stream_on_device", torch.tensor(stream), persistent=False)

    def forward(
        self, y: Float[Tensor, "*dims"], bits: Int[Tensor, "*bits"], seed: Int[Tensor, ""] | None = None
    ) -> Float[Tensor, "*dims"]:
        """Return ``y``; ``seed`` fixes the noise (without a seed, noise is drawn in backward)."""
        if not self.training:
            return y
        same: Tensor = _RoundGradient.apply(y, self.bits_of(bits), self.seed_of(seed), self)
        return same

    def measure(self, g: Float[Tensor, "*dims"], bits: Int[Tensor, "*bits"]) -> None:
        """See a gradient that is about to be rounded."""

    def bits_of(self, control: Tensor) -> Int[Tensor, "*samples"]:
        """The bits of all values, or those of each sample."""
        return control

    def seed_of(self, seed: Int[Tensor, ""] | None) -> Int[Tensor, ""] | None:
        """This op's own seed from that of the step."""
        if seed is None:
            return None
        # A Python number would become a constant of the code compiled for this op, which then could serve no other op.
        return seed + (self.stream_on_device if torch.compiler.is_compiling() else self.stream)


class MixedGradientQuantizer(GradientQuantizer):
    """Rounds the gradient of each sample of ``y`` to the backward bits of its own option.

    At 0 bits the block is skipped, and the sample's gradient is exactly zero. ``choice`` gets no gradient.
    """

    options: Tensor

    def __init__(self, fmt: Format, options: Sequence[int], axis: BatchAxis, stream: int = 0) -> None:
        super().__init__(fmt, axis, stream)
        self.widths = tuple(options)
        self.register_buffer("options", torch.tensor(self.widths), persistent=False)

    def bits_of(self, control: Tensor) -> Int[Tensor, " batch"]:
        return _bits_of_samples(self.options, self.widths, control, _latest_backward)


def picked(choice: Float[Tensor, "batch options"]) -> Int[Tensor, " batch"]:
    """The number of each sample's option: that of the largest entry, which may differ from 1 by a rounding."""
    return choice.detach().argmax(1)


def _bits_of_samples(
    options: Tensor, widths: tuple[int, ...], control: Tensor, latest: Latest
) -> Int[Tensor, " batch"]:
    """The bits of each sample. On a device, where each op is a launch, the ops of a block get the same tensor."""
    control = control if control.ndim == 1 else picked(control)
    if control.is_cpu or torch.compiler.is_compiling():
        return options[control]
    bits: Tensor | None = latest.of(control, widths)
    if bits is None:
        bits = options[control]
        latest.keep(control, widths, bits)
    return bits


class _RoundActivation(torch.autograd.Function):
    """Rounds, and in backward gives the gate the gradient of every option in one pass over ``x`` and its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bits: Tensor,
        choice: Tensor | None,
        lo: Tensor,
        span: Tensor,
        measured_here: bool,
        fmt: Format,
        widths: tuple[int, ...],
        axis: BatchAxis,
        estimate: GateGradient,
    ) -> Tensor:
        ctx.save_for_backward(x, bits, lo, span)
        ctx.fmt, ctx.widths, ctx.axis, ctx.measured_here, ctx.estimate = fmt, widths, axis, measured_here, estimate
        ctx.dtype = None if choice is None else choice.dtype
        rounded = fmt.activation(x, axis.expand(bits, x.shape), ValueRange(lo, span, measured_here))
        return x.clone() if rounded is x else rounded

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_create_graph()
        x, bits, lo, span = ctx.saved_tensors
        of_choice = None
        if ctx.dtype is not None:
            within = ValueRange(lo, span, ctx.measured_here)
            of_choice = gate_gradient(ctx.fmt, x, grads[0], ctx.widths, ctx.axis, within, len(bits), ctx.estimate).to(
                ctx.dtype
            )
        of_x = ctx.fmt.activation_gradient(x, grads[0], ctx.axis.expand(bits, x.shape))
        return of_x, None, of_choice, *[None] * 7


class _RoundWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, bits: Tensor, fmt: Format, dim: int) -> Tensor:
        ctx.save_for_backward(w, bits)
        ctx.fmt = fmt
        rounded = fmt.weight(w, bits, dim=dim)
        return w.clone() if rounded is w else rounded

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_create_graph()
        w, bits = ctx.saved_tensors
        return ctx.fmt.weight_gradient(w, grads[0], bits), None, None, None


class _RoundGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, bits: Tensor, seed: Tensor | None, quantizer: GradientQuantizer) -> Tensor:
        ctx.save_for_backward(bits, seed)
        ctx.quantizer = quantizer
        # Not a view for autograd: an in-place op (ReLU) may follow, which autograd forbids on `y` and `y.view_as(y)`.
        return y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_create_graph()
        if gradients_unrounded():
            return grads[0], None, None, None
        bits, seed = ctx.saved_tensors
        ctx.quantizer.measure(grads[0], bits)
        return rounded_gradient(ctx.quantizer.fmt, grads[0], bits, ctx.quantizer.axis, seed), None, None, None
