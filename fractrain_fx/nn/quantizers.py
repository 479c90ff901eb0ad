"""The modules that quantize the operands of an op: activation, weight and output gradient.

Bits come along graph edges as tensors, never as attributes, so a new precision never changes the graph. The gated
(``Mixed``) ones take the choice of each sample, a one-hot row over the options, and give each sample its own bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fractrain_fx.formats import Format
from fractrain_fx.formats.bits import all_rounded
from fractrain_fx.nn.axis import BatchAxis
from fractrain_fx.nn.ranges import RunningRange
from fractrain_fx.precision import FLOAT_BITS

# Values of which a handful of float32 copies fit a core's second-level cache.
_CACHED = 1 << 15

__all__ = [
    "ActivationQuantizer",
    "GradientQuantizer",
    "MixedActivationQuantizer",
    "MixedGradientQuantizer",
    "WeightQuantizer",
]


class ActivationQuantizer(RunningRange):
    """Rounds an activation to ``bits``, over the batch's range in training and the running range in evaluation."""

    def forward(self, x: Float[Tensor, "*dims"], bits: Int[Tensor, ""]) -> Float[Tensor, "*dims"]:
        lo, span = self.range_of(x)
        return self.fmt.activation(x, bits, lo=lo, span=span)


class MixedActivationQuantizer(ActivationQuantizer):
    """Rounds each sample of an activation to the bits of its own option, all over one range (ALGORITHM 3).

    The gradient of ``choice[i, k]`` is the sum over sample ``i`` of upstream * (Q_k(x) - x), for every option ``k``,
    taken or not; 0 where the option has 0 or 32 bits.

    Args:
        fmt: the number format.
        options: forward bits of each option.
        axis: where the samples lie in ``x``.
        keep: share of the old running range that a training step keeps.
    """

    options: Tensor

    def __init__(self, fmt: Format, options: Sequence[int], axis: BatchAxis, keep: float = 0.9) -> None:
        super().__init__(fmt, keep)
        self.axis = axis
        self.bits = tuple(options)
        self.register_buffer("options", torch.tensor(self.bits), persistent=False)

    def forward(self, x: Float[Tensor, "*dims"], choice: Float[Tensor, "batch options"]) -> Float[Tensor, "*dims"]:
        lo, span = self.range_of(x)
        bits = _bits_of_samples(self.options, choice, self.axis, x.ndim)
        rounded = self.fmt.activation(x, bits, lo=lo, span=span)
        if not (choice.requires_grad and _rounding(self.bits)):
            return rounded
        mixed: Tensor = _GateGradient.apply(rounded, x.detach(), choice, lo, span, self.fmt, self.bits, self.axis)
        return mixed


class WeightQuantizer(nn.Module):
    """Rounds a weight to ``bits``, over one range for each output channel; the master weight stays float.

    Args:
        fmt: the number format.
        dim: the dimension of the weight that holds the output channels.
    """

    def __init__(self, fmt: Format, dim: int) -> None:
        super().__init__()
        self.fmt = fmt
        self.dim = dim

    def forward(self, w: Float[Tensor, "*dims"], bits: Int[Tensor, ""]) -> Float[Tensor, "*dims"]:
        return self.fmt.weight(w, bits, dim=self.dim)


class GradientQuantizer(nn.Module):
    """Leaves an op's output as it is, and rounds the gradient that comes back to it to ``bits``.

    Args:
        fmt: the number format.
        axis: where the samples lie in ``y``, for formats that scale each sample by itself.
    """

    def __init__(self, fmt: Format, axis: BatchAxis | None = None) -> None:
        super().__init__()
        self.fmt = fmt
        self.axis = axis or BatchAxis()

    def forward(self, y: Float[Tensor, "*dims"], bits: Int[Tensor, ""]) -> Float[Tensor, "*dims"]:
        return _quantize_gradient(y, bits, self) if self.training else y


class MixedGradientQuantizer(nn.Module):
    """Rounds the gradient of each sample of ``y`` to the backward bits of its own option.

    Where that is 0 bits the block is skipped, and the sample's gradient is exactly zero. ``choice`` gets no gradient.

    Args:
        fmt: the number format.
        options: backward bits of each option.
        axis: where the samples lie in ``y``.
    """

    options: Tensor

    def __init__(self, fmt: Format, options: Sequence[int], axis: BatchAxis) -> None:
        super().__init__()
        self.fmt = fmt
        self.axis = axis
        self.register_buffer("options", torch.tensor(tuple(options)), persistent=False)

    def forward(self, y: Float[Tensor, "*dims"], choice: Float[Tensor, "batch options"]) -> Float[Tensor, "*dims"]:
        if not self.training:
            return y
        return _quantize_gradient(y, _bits_of_samples(self.options, choice, self.axis, y.ndim), self)


def _rounding(options: Sequence[int]) -> set[int]:
    """The bits among those of the options that change a value."""
    return set(options) - {0, FLOAT_BITS}


def _bits_of_samples(options: Tensor, choice: Tensor, axis: BatchAxis, ndim: int) -> Int[Tensor, "*bits"]:
    # The value of a straight-through one-hot may be off 1 by a rounding; its largest entry is not.
    return axis.expand(options[choice.detach().argmax(1)], ndim)


def _quantize_gradient(y: Tensor, bits: Tensor, quantizer: GradientQuantizer | MixedGradientQuantizer) -> Tensor:
    same: Tensor = _QuantizeGradient.apply(y, bits, quantizer.fmt, quantizer.axis)
    return same


class _QuantizeGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, bits: Tensor, fmt: Format, axis: BatchAxis) -> Tensor:
        ctx.save_for_backward(bits)
        ctx.fmt, ctx.axis = fmt, axis
        # Not a view for autograd, so that an in-place op (ReLU) may follow, which it may not on `y` or `y.view_as(y)`.
        return y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (bits,) = ctx.saved_tensors
        rounded = ctx.fmt.gradient(grads[0], bits, axis=ctx.axis)
        return (rounded if all_rounded(bits) else rounded * (bits != 0)), None, None, None


class _GateGradient(torch.autograd.Function):
    """Passes the mixed activation on; in backward one look at ``x`` and its gradient gives that of every option."""

    @staticmethod
    def forward(
        ctx: Any,
        rounded: Tensor,
        x: Tensor,
        choice: Tensor,
        lo: Tensor,
        span: Tensor,
        fmt: Format,
        options: tuple[int, ...],
        axis: BatchAxis,
    ) -> Tensor:
        ctx.save_for_backward(x, lo, span)
        ctx.fmt, ctx.options, ctx.axis, ctx.dtype = fmt, options, axis, choice.dtype
        return rounded.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, lo, span = ctx.saved_tensors
        options = sorted(_rounding(ctx.options))
        gains = []
        for part, g in zip(_parts(x, ctx.axis), _parts(grads[0], ctx.axis), strict=True):
            errors = ctx.fmt.activation_errors(part, options, lo=lo, span=span)
            gains.append(torch.stack([_inner(error, g, ctx.axis) for error in errors]))
        by_bits = dict(zip(options, torch.cat(gains, dim=1), strict=True))
        none = torch.zeros_like(by_bits[options[0]])
        of_choice = torch.stack([by_bits.get(bits, none) for bits in ctx.options], dim=1)
        return grads[0], None, of_choice.to(ctx.dtype), None, None, None, None, None


def _inner(error: Tensor, g: Tensor, axis: BatchAxis) -> Float[Tensor, " batch"]:
    """The sum over each sample of error times gradient."""
    sums: Tensor = torch.linalg.vecdot(axis.samples_first(error), axis.samples_first(g.to(error.dtype)))
    return sums


def _parts(x: Tensor, axis: BatchAxis) -> Sequence[Tensor]:
    """A few samples at a time, so that what is computed of them stays in a CPU's cache."""
    if x.device.type != "cpu" or torch.compiler.is_compiling() or not (axis.major or axis.factor == 1):
        return (x,)
    samples = x.shape[axis.axis] // axis.factor
    each = max(1, _CACHED * samples // max(x.numel(), 1))
    return torch.split(x, each * axis.factor, dim=axis.axis)
