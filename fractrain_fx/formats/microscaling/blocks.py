"""Cut a tensor into blocks that share a scale, and put it together again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from fractrain_fx.formats.bits import once

__all__ = ["BlockLayout", "Cut", "GroupedRows"]


class Cut(NamedTuple):
    """Dimensions, counted from the front, that are laid end to end and cut into pieces of ``size`` values.

    The last piece may be shorter. One piece holds everything where ``size`` is ``None``.
    """

    dims: tuple[int, ...]
    size: int | None


class BlockLayout:
    """Where the blocks of a tensor lie. A block spans one piece of each cut and one index of every other dimension.

    Args:
        shape: of the tensor.
        cuts: one, or two for square blocks, over different dimensions.
    """

    def __init__(self, shape: Sequence[int], cuts: Sequence[Cut]) -> None:
        self._shape = tuple(shape)
        cut_of = {dim: cut for cut in cuts for dim in cut.dims}
        # In the order of the tensor's memory wherever that can be, so that all steps of a rounding run along it.
        self._groups: list[tuple[tuple[int, ...], int | None]] = []
        self.dims: list[int] = []
        """The dimensions of what :meth:`split` gives that lie inside one block."""
        place = 0
        for dim in range(len(shape)):
            cut = cut_of.get(dim)
            if cut is None or cut.size is None:
                self._groups.append(((dim,), None))
                self.dims += [] if cut is None else [place]
                place += 1
            elif dim == max(cut.dims):
                self._groups.append((cut.dims, min(cut.size, self._length(cut.dims))))
                self.dims.append(place + 1)
                place += 2
        self._order = [dim for dims, _ in self._groups for dim in dims]

    def split(self, x: Float[Tensor, "*dims"]) -> Float[Tensor, "*blocks"]:
        """Each cut as two dimensions, pieces and places in a piece. A view where memory allows it."""
        lengths = [self._length(dims) for dims, _ in self._groups]
        x = x.permute(self._order).reshape(lengths)
        padding: list[int] = []
        for (_, size), length in zip(self._groups, lengths, strict=True):
            padding = [0, 0 if size is None else -length % size, *padding]
        if any(padding):
            x = F.pad(x, padding)
        place = 0
        for _, size in self._groups:
            if size is not None:
                x = torch.unflatten(x, place, (-1, size))
            place += 1 if size is None else 2
        return x

    def join(self, x: Float[Tensor, "*blocks"]) -> Float[Tensor, "*dims"]:
        """The tensor of blocks."""
        for place, (dims, size) in enumerate(self._groups):
            if size is None:
                continue
            x, length = x.flatten(place, place + 1), self._length(dims)
            if length < x.shape[place]:
                # Whole before it is cut: a loop of torch 2.14's compiler over a shorter last block leaves values out.
                x = once(x).narrow(place, 0, length)
        x = x.reshape([self._shape[dim] for dim in self._order])
        return x.permute(sorted(range(len(self._order)), key=self._order.__getitem__))

    def _length(self, dims: tuple[int, ...]) -> int:
        return math.prod([self._shape[dim] for dim in dims])

    def largest(self, blocks: Float[Tensor, "*blocks"]) -> Float[Tensor, "*blocks"]:
        """The largest size of a value in each block, shaped to broadcast against them."""
        return blocks.abs().amax(self.dims, keepdim=True)

    def over_stretches(
        self, found: Float[Tensor, "*blocks"], count: int, how: Literal["largest", "sum"]
    ) -> Float[Tensor, "*blocks"]:
        """For each block, the largest or the sum of a number that each of ``count`` neighbouring blocks has.

        Stretches follow one another along the first cut, beginning with its first block.
        """
        place = self.dims[0] - 1
        missing = -found.shape[place] % count
        whole = F.pad(found, (*(0, 0) * (found.ndim - place - 1), 0, missing)) if missing else found
        stretches = whole.unflatten(place, (-1, count))
        dim = place + 1
        over = stretches.amax(dim, keepdim=True) if how == "largest" else stretches.sum(dim, keepdim=True)
        return once(over.expand_as(stretches).flatten(place, dim)).narrow(place, 0, found.shape[place])


class GroupedRows(BlockLayout):
    """A scale for each column of each group of rows, as in the weight gradient of a grouped product.

    Args:
        shape: of the matrix.
        cuts: one, over all rows.
        ends: the row behind the last one of each group. Rows behind all groups share scales too.
    """

    def __init__(self, shape: Sequence[int], cuts: Sequence[Cut], ends: Int[Tensor, " groups"]) -> None:
        super().__init__(shape, cuts)
        rows = torch.arange(shape[0], device=ends.device, dtype=ends.dtype)
        self._group, self._count = torch.searchsorted(ends, rows, right=True), len(ends) + 1

    def largest(self, blocks: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
        sizes = blocks.new_zeros(self._count, *blocks.shape[1:])
        return sizes.scatter_reduce(0, self._group[:, None].expand_as(blocks), blocks.abs(), "amax")[self._group]
