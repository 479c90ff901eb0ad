"""The gate's gradient: how each option's rounding would change the loss, in one pass over a tensor and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from fractrain_fx.formats.affine.scale import scale_number, scales
from fractrain_fx.formats.base import ValueRange
from fractrain_fx.formats.bits import of_options, readable, sum_of_samples
from fractrain_fx.formats.scratch import scratch

__all__ = ["affine_gains"]

# So many values that a few float32 copies of them fit into a CPU's caches.
_CACHED = 1 << 19

# Slots of scratch memory, after the three that a product's operands take.
_SLOTS = (3, 4)


def affine_gains(
    x: Float[Tensor, "batch ..."],
    g: Float[Tensor, "batch ..."],
    bits: Sequence[int],
    within: ValueRange,
    *,
    squared: bool = False,
) -> Float[Tensor, "batch options"]:
    """For each option's bits, the sum over each sample of ``g * (Q(x) - x)``, on the affine grid of a range.

    Args:
        x: values, samples first.
        g: gradient of the rounded values.
        bits: of each option; the sums for 0 and 32 bits are 0.
        within: the range, whose ends are 0-dim.
        squared: sum the squares instead.

    Returns:
        Sums in the type of the range (float32 or wider).
    """
    lo, span, _ = within
    x, g = x.flatten(1), g.flatten(1)

    def gains(widths: Sequence[int]) -> Tensor:
        if x.dtype != lo.dtype or not readable(x):
            return torch.stack([sum_of_samples(_error(x, each, within) * g, squared) for each in widths], dim=1)
        distances = [scale_number(float(span), each) for each in widths]
        rows = max(1, _CACHED // max(x.shape[1], 1))
        parts = zip(torch.split(x, rows), torch.split(g, rows), strict=True)
        return torch.cat([_gains(part, upstream, widths, distances, within, squared) for part, upstream in parts])

    return of_options(bits, gains)


def _gains(
    x: Tensor, g: Tensor, bits: Sequence[int], distances: Sequence[float], within: ValueRange, squared: bool
) -> Tensor:
    """The sums of all options for some samples, in few passes over scratch memory.

    The difference ``Q(x) - x`` is taken before the sum: the sums of its two terms would be large and nearly equal.
    """
    kept = map(partial(scratch, x), _SLOTS)
    offset, steps = (torch.empty_like(x) if each is None else each for each in kept)
    offset = torch.sub(x, within.lo, out=offset) if float(within.lo) else x
    found = []
    for each, scale in zip(bits, distances, strict=True):
        torch.div(offset, torch.tensor(scale, dtype=x.dtype), out=steps).round_()
        if not within.measured_here:
            steps.clamp_(0, 2**each - 1)
        torch.add(offset, steps, alpha=-scale, out=steps)
        steps.mul_(g)
        found.append(steps.square_().sum(1) if squared else steps.sum(1).neg_())
    return torch.stack(found, dim=1)


def _error(x: Tensor, bits: int, within: ValueRange) -> Tensor:
    """``Q(x) - x``; for a half type, ``Q(x)`` is then rounded to that type."""
    lo, span, measured_here = within
    highest = 2**bits - 1
    scale = scales(span, bits)
    offset = x.to(lo.dtype) - lo
    steps = offset / scale
    rounded = (steps if measured_here else steps.clamp_(0, highest)).round_().mul_(scale)
    if x.dtype != lo.dtype:
        rounded = rounded.add_(lo).to(x.dtype).to(lo.dtype).sub_(lo)
    error: Tensor = rounded - offset
    return error
