"""The running range of an activation, in which evaluation quantizes."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from fractrain_fx.formats import Format, ValueRange
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.formats.running import RangeBuffers
from fractrain_fx.nn.full_precision import FullPrecision

__all__ = ["RunningRange"]


class RunningRange(FullPrecision):
    """The range to quantize an activation in: the batch's in training, the running one in evaluation.

    A format with a range for each sample measures these in both.

    ``running = keep * running + (1 - keep) * batch`` for low end and width, from the first batch on. A batch whose
    range is not finite leaves the running range as it was. ``lo`` and ``span``, its low end and width, are float32;
    until ``seen``, when the first batch has filled them, they are those of the example inputs, or 0.
    """

    lo: Tensor
    span: Tensor
    seen: Tensor

    def __init__(self, fmt: Format, keep: float = 0.9, axis: BatchAxis | None = None) -> None:
        super().__init__()
        self.fmt = fmt
        self.axis = axis or BatchAxis()
        self.keep = keep
        self.register_buffer("lo", torch.zeros(()))
        self.register_buffer("span", torch.zeros(()))
        # A format that measures blocks as it rounds, or each sample, needs no running range.
        self.register_buffer("seen", torch.tensor(fmt.per_product or fmt.by_sample))

    def forward(self, x: Float[Tensor, "*dims"]) -> ValueRange:
        """The range for ``x``; in training the running range moves towards it."""
        if self.fmt.by_sample:
            return self.fmt.sample_ranges(x.detach(), self.axis)
        if not self.training or self.fmt.per_product:
            return ValueRange(self.lo, self.span)
        return self.fmt.moved_range(x.detach(), RangeBuffers(self.lo, self.span, self.seen), 1 - self.keep)
