"""Where the samples of a batch lie in a tensor, and how per-sample values reach them."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

__all__ = ["BatchAxis"]


@dataclass(frozen=True)
class BatchAxis:
    """The dimension of a tensor that holds its samples.

    Attributes:
        axis: the dimension, counted from the front.
        factor: rows of that dimension that belong to one sample (windows or heads folded into it).
        major: whether a sample's rows lie next to each other (``b f``) or are strided (``f b``).
        whole: no dimension does: all values count as one sample's, so that there is one choice for the batch.
    """

    axis: int = 0
    factor: int = 1
    major: bool = True
    whole: bool = False

    def expand(self, per_sample: Float[Tensor, " batch"], ndim: int) -> Tensor:
        """Shape one value a sample so that it broadcasts over a tensor of ``ndim`` dimensions."""
        if self.whole:
            return per_sample.view([1] * ndim)
        if self.factor != 1:
            if self.major:
                per_sample = per_sample.repeat_interleave(self.factor)
            else:
                per_sample = per_sample.repeat(self.factor)
        return per_sample.view([-1 if dim == self.axis else 1 for dim in range(ndim)])

    def samples_first(self, x: Tensor) -> Float[Tensor, "batch rest"]:
        """All values of each sample as one row."""
        if self.whole:
            return x.reshape(1, -1)
        x = x.movedim(self.axis, 0)
        if self.factor == 1:
            return x.flatten(1) if x.ndim > 1 else x.unsqueeze(1)
        if self.major:
            return x.reshape(x.shape[0] // self.factor, -1)
        x = x.reshape(self.factor, x.shape[0] // self.factor, -1)
        return x.movedim(0, 1).flatten(1)
