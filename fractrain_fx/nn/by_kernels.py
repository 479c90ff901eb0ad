"""The rounding of a fused op by C++ kernels alone (``rounding="compiled"``), with little Python around them.

A model has a hundred such ops, so that what passes before a kernel starts adds up to some per cent of a step. This is,
in short, what :mod:`fractrain_fx.nn.factor` and :mod:`fractrain_fx.nn.rounding` do for every format and device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fractrain_fx.formats import AffineFormat, Format
from fractrain_fx.formats.affine_compiled import measure_compiled, round_compiled
from fractrain_fx.formats.scratch import scratch, scratch_holds
from fractrain_fx.nn.axis import BatchAxis
from fractrain_fx.nn.factor import Factor

__all__ = ["has_all_kernels", "round_factor", "round_gradient"]


def has_all_kernels(first: Factor, second: Factor, gradient: Format) -> bool:
    """Whether kernels round all that an op rounds, which keeps no rounded copies."""
    formats = (first.fmt, second.fmt, gradient)
    compiled = all(isinstance(fmt, AffineFormat) and fmt.compiled for fmt in formats)
    return compiled and first.saved == second.saved == "operands"


def round_factor(factor: Factor, x: Tensor, bits: Tensor, lo: Tensor, span: Tensor, slot: int) -> Tensor | None:
    """A rounded factor in memory that is used again, where it may lie already; ``None`` where kernels do not take it.

    Not in compiled graphs.
    """
    if not _takes(x) or lo.dtype != torch.float32:
        return None
    if factor.weight:
        out = scratch(x, slot, matrices=factor.matrices)
        return round_compiled(x, bits, lo, span, inside=True, out=out)
    how = factor.axis, factor.inside, factor.matrices, bits.tolist(), float(lo), float(span)
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
    lo, span = measure_compiled(g, ())
    out = scratch(g, slot, matrices=matrices)
    bits = axis.expand(bits, g.shape)
    return round_compiled(g, bits, lo, span, stochastic=True, seed=seed, inside=True, erase=True, out=out)


def _takes(x: Tensor) -> bool:
    return x.is_cpu and x.dtype == torch.float32 and x.numel() > 0
