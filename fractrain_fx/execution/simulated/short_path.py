"""The rounding of a fused op by C++ kernels alone (``rounding="compiled"``), with little Python around them.

A model has a hundred such ops, so the time before each kernel starts adds up to some per cent of a step. These
functions do for the affine format on a CPU what ``execution/simulated/operand.py`` and ``nn/rounding.py`` do for all
formats and devices.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fractrain_fx.execution.simulated.operand import Factor, Rounds
from fractrain_fx.formats import Format, ValueRange
from fractrain_fx.formats.scratch import Order, scratch, scratch_holds
from fractrain_fx.kernels.affine import (
    has_kernels,
    round_channels_compiled,
    round_compiled,
)
from fractrain_fx.nn.batch_axis import BatchAxis

__all__ = ["has_all_kernels", "round_factor", "round_gradient", "weight_range"]


def has_all_kernels(first: Factor, second: Factor, gradient: Format) -> bool:
    """Whether kernels round both factors and the gradient of an op."""
    formats = (first.fmt, second.fmt, gradient)
    return all(fmt.has_codes and "cpu" in fmt.kernels for fmt in formats)


def weight_range(factor: Factor, w: Tensor, bits: Tensor, slot: int) -> ValueRange | None:
    """The ranges of a weight's channels; it is rounded in the same pass, for :func:`round_factor` to find.

    ``None`` if the kernel does not take the weight.
    """
    if not has_kernels(w) or factor.channel != 0 or not w.is_contiguous():
        return None
    out = scratch(w, slot, factor.order)
    if out is None:
        return None
    within, rounded = round_channels_compiled(w.detach(), bits, out)
    if rounded is out:
        scratch_holds(slot).keep(w, _ready(factor, bits), out)
    return within


def round_factor(factor: Factor, x: Tensor, rounds: Rounds, slot: int, order: Order | None = None) -> Tensor | None:
    """A rounded factor in scratch memory, where it may lie already; ``None`` if the kernels do not take it."""
    bits, within = rounds
    if not has_kernels(x, within.lo):
        return None
    if not factor.weight:

        def rounded(out: Tensor | None) -> Tensor | None:
            return round_compiled(x, factor.axis.expand(bits, x.shape), within, out=out)

        return factor.once(x, rounds, slot, rounded, order)
    ready: Tensor | None = scratch_holds(slot).of(x, _ready(factor, bits))
    if ready is not None:
        return ready
    # Not recorded for the next op: a weight that an optimizer changes through `data` shows no sign of the change.
    return round_compiled(x, bits, within, out=scratch(x, slot, factor.order))


def round_gradient(
    fmt: Any, g: Tensor, bits: Tensor, axis: BatchAxis, seed: Tensor | None, slot: int, order: Order
) -> Tensor | None:
    """An output gradient, rounded like :func:`~fractrain_fx.nn.rounding.rounded_gradient`; ``None`` if not possible."""
    if not has_kernels(g):
        return None
    out = scratch(g, slot, order)
    bits = axis.expand(bits, g.shape)
    return round_compiled(g, bits, fmt.gradient_range(g, bits), stochastic=True, seed=seed, erase=True, out=out)


def _ready(factor: Factor, bits: Tensor) -> tuple[object, ...]:
    return "weight", factor.fmt, factor.order, int(bits)
