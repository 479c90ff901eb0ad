"""The bits that the gradient of each sample needs on the levels of its batch."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fractrain_fx.formats import Format
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.nn.quantizers import GradientQuantizer

__all__ = ["MeasuringGradientQuantizer"]


class MeasuringGradientQuantizer(GradientQuantizer):
    """Rounds as its base, and measures how many bits the samples need, which the cost of the next step takes.

    All samples share the levels of the batch's range. A sample whose gradient is a sixteenth as wide has numbers of
    levels that take 4 bits less, counted from its lowest level. Its rounded values are the same.

    ``share`` has the mean bits that the samples of the last backward pass needed, as a share (0..1) of those that they
    were rounded to (0-dim buffer); 1 before the first pass, and after a gradient that is not finite.
    """

    share: Tensor

    def __init__(self, fmt: Format, axis: BatchAxis | None = None, stream: int = 0) -> None:
        super().__init__(fmt, axis, stream)
        self.register_buffer("share", torch.ones(()))

    def measure(self, g: Float[Tensor, "*dims"], bits: Int[Tensor, ""]) -> None:
        needed = self.fmt.needed_bits(g.detach(), bits, self.axis)
        self.share.copy_((needed.mean() / bits).nan_to_num(1.0))
