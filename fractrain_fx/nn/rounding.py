"""The steps of quantized backpropagation, as functions that both a quantizer and a fused op call, and their noise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn

from fractrain_fx.config.gate import GateGradient
from fractrain_fx.errors import ConfigError
from fractrain_fx.formats import Format, ValueRange
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.formats.bits import once
from fractrain_fx.formats.noise import draw_seed

__all__ = [
    "NoiseSeed",
    "gate_gradient",
    "gradients_unrounded",
    "of_mean_loss",
    "refuse_create_graph",
    "rounded_gradient",
    "unrounded_gradients",
]

# Set for all threads: autograd runs the backward pass of a GPU in a thread of its own.
_unrounded = False


@contextmanager
def unrounded_gradients() -> Iterator[None]:
    """Backward passes inside round nothing that the forward pass has not rounded. Compiled graphs do not look."""
    global _unrounded
    before, _unrounded = _unrounded, True
    try:
        yield
    finally:
        _unrounded = before


def gradients_unrounded() -> bool:
    """Whether backward is to round nothing."""
    return _unrounded


def gate_gradient(
    fmt: Format,
    x: Float[Tensor, "*dims"],
    g: Float[Tensor, "*dims"],
    options: Sequence[int],
    axis: BatchAxis,
    within: ValueRange,
    samples: int,
    estimate: GateGradient,
) -> Float[Tensor, "batch options"]:
    """The gradient of each option of each sample, 0 for 0 and 32 bits; ``g`` is that of the rounded activation.

    ``straight-through`` is ``<g, Q_k(x) - x>``: the first term of what rounding does to the loss. Over samples it has
    nearly no mean, as rounding errors have none. ``fisher`` is the mean of the second term, ``n / 2`` times the sum of
    ``(g * (Q_k(x) - x))**2`` for a loss that is the mean of n samples: the squares of a sample's own gradient, ``n *
    g``, stand for the curvature (the diagonal of the empirical Fisher information). ``within`` is the range in which
    ``x`` was rounded, or those of its samples; ``options`` are forward bits.
    """
    x, g = axis.apart(x, samples), axis.apart(g, samples)
    if within.lo.ndim:
        lo, span = axis.apart(within.lo, samples), axis.apart(within.span, samples)
        within = ValueRange(lo, span, within.measured_here)
    sums = fmt.activation_gains(x, g, options, within, squared=estimate == "fisher")
    return of_mean_loss(sums, samples, estimate)


def of_mean_loss(
    sums: Float[Tensor, "batch options"], samples: int, estimate: GateGradient
) -> Float[Tensor, "batch options"]:
    """The gradient of a loss that is the mean of the samples, from the sums of :meth:`Format.activation_gains`."""
    return sums * (samples / 2) if estimate == "fisher" else sums


def rounded_gradient(
    fmt: Format,
    g: Float[Tensor, "*dims"],
    bits: Tensor,
    axis: BatchAxis,
    seed: Tensor | None,
    out: Tensor | None = None,
) -> Float[Tensor, "*dims"]:
    """An output gradient, rounded to its bits; exactly zero, not noise, for samples at 0 bits, whose block is skipped.

    ``bits`` is one width, or one for each sample; ``out`` is memory that the result may use.
    """
    axis = axis.of_bits(bits, g.shape)
    return fmt.output_gradient(g, axis.expand(bits, g.shape), axis=axis, seed=seed, out=out)


def refuse_create_graph() -> None:
    """Refuse, in backward, to differentiate the gradient: it was rounded, and rounding has no derivative."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise ConfigError(
            "create_graph=True (a gradient penalty, a Hessian) asks for the gradient of a gradient that was rounded, "
            "and rounding has none. Take the penalty through the float original, which has the same weights: plain = "
            "model.restore(); y = plain(x); penalty = f(torch.autograd.grad(y.sum(), x, create_graph=True)); "
            "engine.loss(criterion(model(x), target) + penalty)"
        )


# Distance between the seeds of two processes: so large that no process meets the seeds of another process's ops.
_BETWEEN_RANKS = 0x9E3779B97F4A7C1
_SEEDS = 1 << 64  # seeds are signed numbers of 64 bits, and sums of them wrap around


class NoiseSeed(nn.Module):
    """Draws one seed for each training step from torch's default generator, and shifts it differently on each process.

    So ``torch.manual_seed`` fixes the noise of a run, each step has other noise, and processes that were given the same
    seed still round differently. Evaluation draws nothing.
    """

    where: Tensor

    def __init__(self) -> None:
        super().__init__()
        # Its device tells a compiled graph where to draw. An eager step draws on the host, which needs the number.
        self.register_buffer("where", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self) -> Int[Tensor, ""]:
        """A 0-dim int64 tensor."""
        if not self.training:
            return self.where
        device = self.where.device if torch.compiler.is_compiling() else "cpu"
        together = dist.is_available() and dist.is_initialized()
        apart = (dist.get_rank() if together else 0) * _BETWEEN_RANKS
        return once(draw_seed(device) + ((apart + _SEEDS // 2) % _SEEDS - _SEEDS // 2))
