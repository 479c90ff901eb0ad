"""The rounding of a fused op by C++ kernels alone (``rounding="compiled"``), with little Python around them.

A model has a hundred such ops, so that what passes before a kernel starts adds up to some per cent of a step. This is,
in short, what :mod:`fractrain_fx.nn.factor` and :mod:`fractrain_fx.nn.rounding` do for every format and device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fractrain_fx.formats import AffineFormat, Format
from fractrain_fx.formats.affine_compiled import round_channels_compiled, round_compiled, round_gradient_compiled
from fractrain_fx.formats.scratch import scratch, scratch_holds
from fractrain_fx.nn.axis import BatchAxis
from fractrain_fx.nn.factor import Factor

__all__ = ["has_all_kernels", "round_factor", "round_gradient", "weight_ends"]


def has_all_kernels(first: Factor, second: Factor, gradient: Format) -> bool:
    """Whether kernels round all that an op rounds, which keeps no rounded copies."""
    formats = (first.fmt, second.fmt, gradient)
    compiled = all(isinstance(fmt, AffineFormat) and fmt.compiled for fmt in formats)
    return compiled and first.saved == second.saved == "operands"


def weight_ends(factor: Factor, w: Tensor, bits: Tensor, slot: int) -> tuple[Tensor, Tensor] | None:
    """The ranges of a weight's channels, found while it is rounded: the result lies ready for :func:`round_factor`.

    ``None`` where kernels do not take it so.
    """
    if not _takes(w) or factor.channel != 0 or not w.is_contiguous():
        return None
    out = scratch(w, slot, matrices=factor.matrices)
    if out is None:
        return None
    lo, span, rounded = round_channels_compiled(w.detach(), bits, out)
    if rounded is out:
        scratch_holds(slot).keep(w, _how(factor, bits), out)
    return lo, span


def round_factor(factor: Factor, x: Tensor, bits: Tensor, lo: Tensor, span: Tensor, slot: int) -> Tensor | None:
    """A rounded factor in memory that is used again, where it may lie already; ``None`` where kernels do not take it.

    Not in compiled graphs.
    """
    if not _takes(x) or lo.dtype != torch.float32:
        return None
    how = _how(factor, bits) if factor.weight else (*_how(factor, bits), float(lo), float(span))
    holds = scratch_holds(slot)
    rounded: Tensor | None = holds.of(x, how)
    if rounded is None:
        out = scratch(x, slot, matrices=factor.matrices)
        bits = factor.axis.expand(bits, x.shape)
        rounded = round_compiled(x, bits, lo, span, inside=factor.inside, out=out)
        if out is not None and rounded is out:
            holds.keep(x, how, out)
    return rounded


def round_gradient(
    g: Tensor, bits: Tensor, axis: BatchAxis, seed: Tensor | None, slot: int, *, matrices: bool
) -> Tensor | None:
    """An output gradient, rounded as :func:`~fractrain_fx.nn.rounding.rounded_gradient` does; ``None`` as there."""
    if not _takes(g):
        return None
    out = scratch(g, slot, matrices=matrices)
    return round_gradient_compiled(g, axis.expand(bits, g.shape), seed=seed, out=out)


def _how(factor: Factor, bits: Tensor) -> tuple[object, ...]:
    return factor.weight, factor.channel, factor.axis, factor.inside, factor.matrices, bits.tolist()


def _takes(x: Tensor) -> bool:
    return x.is_cpu and x.dtype == torch.float32 and x.numel() > 0
