"""A fused product of groups of rows, each with its own matrix, in which no block of values spans two groups."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fractrain_fx.execution.fused_op import FusedOp
from fractrain_fx.execution.remade import Made
from fractrain_fx.formats import ValueRange

__all__ = ["Alignment", "GroupedOp", "aligned"]


class Alignment(NamedTuple):
    """The places of rows in a matrix whose groups rows of zeros fill up.

    Attributes:
        places: the new place of each row.
        ends: the row behind each group.
        rows: the number of rows, which depends on shapes only.
    """

    places: Int[Tensor, " rows"]
    ends: Int[Tensor, " groups"]
    rows: int


def aligned(ends: Int[Tensor, " groups"], rows: int, size: int) -> Alignment:
    """Let each group begin at a multiple of ``size``. Rows behind the last group stay behind it."""
    lengths = ends.diff(prepend=ends.new_zeros(1))
    missing = (-lengths).remainder(size)
    new_ends = ends + missing.cumsum(0, dtype=ends.dtype)
    shifts = torch.cat([new_ends.new_zeros(1), new_ends - ends])
    row = torch.arange(rows, device=ends.device, dtype=ends.dtype)
    places = row + shifts[torch.searchsorted(ends, row, right=True)]
    room = rows + len(ends) * (size - 1)
    return Alignment(places, new_ends, room + -room % size)


class GroupedOp(FusedOp):
    """A fused ``grouped_mm``.

    Formats whose values share scales in blocks, or that transform neighbours, get each group filled up with rows of
    zeros to whole blocks, as kernels for experts require it.
    """

    def forward(
        self,
        controls: tuple[Tensor, Tensor, Tensor],
        choice: Float[Tensor, "batch options"] | None,
        ranges: tuple[ValueRange | None, ValueRange | None],
        seed: Int[Tensor, ""],
        a: Float[Tensor, "rows inputs"],
        b: Float[Tensor, "groups inputs outputs"],
        added: Int[Tensor, " groups"] | None,
        made: Made | None = None,
    ) -> Float[Tensor, "rows outputs"]:
        """Contract with rounded operands; ``added`` holds the ends of the groups. For the rest see :class:`FusedOp`."""
        size = self.plan.fmt.group_alignment
        if added is None or size == 1:
            return super().forward(controls, choice, ranges, seed, a, b, added, made)
        places, ends, rows = aligned(added, len(a), size)
        spread = a.new_zeros(rows, a.shape[1]).index_copy(0, places.long(), a)
        out = super().forward(controls, choice, ranges, seed, spread, b, ends)
        return out.index_select(0, places)
