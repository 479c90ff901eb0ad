"""Cut a tensor into blocks that share a scale, and put it together again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from fractrain_fx.formats.bits import once

__all__ = ["Blocks", "Cut"]


class Cut(NamedTuple):
    """Dimensions, counted from the front, that are laid end to end and cut into pieces of ``size`` values.

    The last piece may be shorter. One piece holds everything where ``size`` is ``None``.
    """

    dims: tuple[int, ...]
    size: int | None


class Blocks:
    """Where the blocks of a tensor lie. A block spans one piece of each cut and one index of every other dimension.

    Args:
        shape: of the tensor.
        cuts: one, or two for square blocks, over different dimensions.
    """

    def __init__(self, shape: Sequence[int], cuts: Sequence[Cut]) -> None:
        pieces = [cut for cut in cuts if cut.size is not None]
        self._sizes = [cut.size for cut in pieces if cut.size is not None]
        cut_dims = [dim for cut in pieces for dim in cut.dims]
        self._kept = [dim for dim in range(len(shape)) if dim not in cut_dims]
        self._order = [*self._kept, *cut_dims]
        self._lengths = [math.prod([shape[dim] for dim in cut.dims]) for cut in pieces]
        self._shape = tuple(shape)
        whole = {dim for cut in cuts if cut.size is None for dim in cut.dims}
        first = len(self._kept)
        places = [first + 2 * number + 1 for number in range(len(pieces))]
        self.dims = [place for place, dim in enumerate(self._kept) if dim in whole] + places
        """The dimensions of what :meth:`split` gives that lie inside one block."""

    def split(self, x: Float[Tensor, "*dims"]) -> Float[Tensor, "*blocks"]:
        """Each cut as two dimensions at the end, pieces and places in a piece. A view where memory allows it."""
        if not self._sizes:
            return x
        x = x.permute(self._order)
        x = x.reshape(*(self._shape[dim] for dim in self._kept), *self._lengths)
        first = len(self._kept)
        padding: list[int] = []
        for size, length in zip(self._sizes, self._lengths, strict=True):
            padding = [0, -length % size, *padding]
        if any(padding):
            x = F.pad(x, padding)
        for number, size in enumerate(self._sizes):
            x = torch.unflatten(x, first + 2 * number, (-1, size))
        return x

    def join(self, x: Float[Tensor, "*blocks"]) -> Float[Tensor, "*dims"]:
        """The tensor of blocks."""
        if not self._sizes:
            return x
        first = len(self._kept)
        for number, length in enumerate(self._lengths):
            x = x.flatten(first + number, first + number + 1)
            if length < x.shape[first + number]:
                # Whole before it is cut: a loop of torch 2.14's compiler over a shorter last block leaves values out.
                x = once(x).narrow(first + number, 0, length)
        x = x.reshape([self._shape[dim] for dim in self._order])
        back = sorted(range(len(self._order)), key=self._order.__getitem__)
        return x.permute(back)

    def largest(self, blocks: Float[Tensor, "*blocks"]) -> Float[Tensor, "*blocks"]:
        """The largest size of a value in each block, shaped to broadcast against them."""
        return blocks.abs().amax(self.dims, keepdim=True)
