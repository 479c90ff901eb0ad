"""The running range of an activation: where it lies, and how it moves to that of a batch."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fractrain_fx.formats.bits import readable

__all__ = ["RangeBuffers", "move_range"]


class RangeBuffers(NamedTuple):
    """The buffers of a running range, which move in place.

    Attributes:
        lo: low end, in float32.
        span: width.
        seen: whether any batch has filled it.
    """

    lo: Tensor
    span: Tensor
    seen: Tensor


def move_range(running: RangeBuffers, lo: Tensor, span: Tensor, weight: float) -> None:
    """Move a running range to that of a batch, in place, unless that is not finite.

    Args:
        running: it counts as 0 before the first batch, which has weight 1, so that the range of that batch is taken
            exactly.
        lo: low end of the batch's range.
        span: its width.
        weight: of the batch.
    """
    if lo.dtype != running.lo.dtype:
        lo, span = lo.to(running.lo.dtype), span.to(running.lo.dtype)
    if readable(span):  # a pass over one number costs as much as one over thousands
        if math.isfinite(float(span)) and math.isfinite(float(lo)):
            weight = weight if bool(running.seen) else 1.0
            running.lo.lerp_(lo, weight)
            running.span.lerp_(span, weight)
            running.seen.fill_(True)
        return
    # No branch on values, which would break a compiled graph, and little arithmetic, because each step of it is
    # compiled once for each quantized activation.
    finite = torch.eq((lo - lo) + (span - span), 0.0)
    weights = torch.where(running.seen, weight, 1.0)
    old_lo, old_span = running.lo * running.seen, running.span * running.seen
    running.lo.copy_(torch.where(finite, old_lo + weights * (lo - old_lo), running.lo))
    running.span.copy_(torch.where(finite, old_span + weights * (span - old_span), running.span))
    running.seen.logical_or_(finite)
