"""Where the samples of a batch lie in a tensor, and how per-sample values reach them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from fractrain_fx.errors import InputError

__all__ = ["BatchAxis"]


@dataclass(frozen=True)
class BatchAxis:
    """The dimension of a tensor that holds its samples.

    Attributes:
        axis: the dimension, counted from the front.
        factor: rows of that dimension that belong to one sample (windows, heads or positions folded into it), in the
            call that was recorded. If it is above 1, calls with other sizes have other numbers of rows.
        major: whether a sample's rows lie next to each other (``b f``) or are strided (``f b``).
        whole: whether no dimension holds samples. All values then count as one sample's, with one choice for the batch.
    """

    axis: int = 0
    factor: int = 1
    major: bool = True
    whole: bool = False

    @property
    def folded(self) -> bool:
        """Whether a sample has several rows of the dimension."""
        return self.factor != 1 and not self.whole

    def expand(self, per_sample: Float[Tensor, " batch"], shape: Sequence[int]) -> Tensor:
        """Shape one value for each sample to broadcast over a tensor of ``shape``; a 0-dim value holds for all."""
        if per_sample.ndim == 0:
            return per_sample
        if self.whole:
            return per_sample.view([1] * len(shape))
        if self.folded:
            rows = shape[self.axis] // max(len(per_sample), 1)
            per_sample = per_sample.repeat_interleave(rows) if self.major else per_sample.repeat(rows)
        return per_sample.view([-1 if dim == self.axis else 1 for dim in range(len(shape))])

    def at(self, shape: Sequence[int], samples: int) -> BatchAxis:
        """This axis in a tensor of ``samples`` samples, which may have another number of rows than when recorded."""
        if not (self.folded and samples):
            return self
        return replace(self, factor=shape[self.axis] // samples)

    def of_bits(self, bits: Tensor, shape: Sequence[int]) -> BatchAxis:
        """This axis in a tensor whose samples have these bits; as it is if one width holds for all."""
        return self.at(shape, len(bits)) if bits.ndim else self

    def samples_first(self, x: Tensor, samples: int | None = None) -> Float[Tensor, "batch rest"]:
        """All values of each sample as one row; without ``samples``, each has as many rows as were recorded.

        Raises:
            InputError: the number of rows is not a multiple of a sample's.
        """
        return self.apart(x, samples).flatten(1)

    def apart(self, x: Tensor, samples: int | None = None) -> Float[Tensor, "batch ..."]:
        """A view of ``x`` with the samples along the first of two or more dimensions.

        Raises:
            InputError: the number of rows is not a multiple of a sample's.
        """
        if self.whole:
            return x.unsqueeze(0) if x.ndim else x.view(1, 1)
        x = x.movedim(self.axis, 0)
        if not self.folded:
            return x if x.ndim > 1 else x.unsqueeze(1)
        if samples is None and x.shape[0] % self.factor:
            raise InputError(
                f"a tensor has {x.shape[0]} rows, not a multiple of the {self.factor} that a sample had when the model "
                "was recorded: give inputs of the length that the example inputs have"
            )
        samples = x.shape[0] // self.factor if samples is None else samples
        if not samples:
            return x.reshape(0, 0)
        rows = x.shape[0] // samples
        if self.major:
            return torch.unflatten(x, 0, (samples, rows))
        return torch.unflatten(x, 0, (rows, samples)).movedim(1, 0)
