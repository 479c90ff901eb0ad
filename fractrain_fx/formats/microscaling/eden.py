"""MS-EDEN: rounding to nearest whose scales are corrected so that the expected value stays (arXiv 2601.22813).

A vector ``v`` that a random rotation mixed is rounded to the nearest numbers ``q``. ``q * <v, v> / <v, q>`` then has
``v`` as its projection on ``v``, and the mean over rotations is ``v`` itself, at less than half the error of stochastic
rounding of each number. Only the corrected scales, which have to be e4m3 numbers, are rounded by chance.

The authors' code is the definition: products are of values in units of their blocks' scales, the largest value of a
block becomes a little more than 6, and the largest scale is 256, which leaves room for corrections.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fractrain_fx.formats.microscaling.blocks import BlockLayout
from fractrain_fx.formats.microscaling.elements import ELEMENTS, Grid, round_to_grid
from fractrain_fx.formats.microscaling.scales import relative_scales
from fractrain_fx.formats.noise import dither

__all__ = ["EDEN_PEAK", "EDEN_TOP", "round_by_eden"]

EDEN_TOP = 6 / (17 / 16 * 0.93)
"""What the largest value of a block becomes: 0.93 has the least error, and 17 / 16 is the room of e4m3's rounding."""

EDEN_PEAK = 255.99 * EDEN_TOP / 6
"""The e4m3 number that belongs to the tensor's largest value, if that became 6."""


def round_by_eden(
    parts: Float[Tensor, "*blocks"], grid: Grid, blocks: BlockLayout, count: int, seed: Int[Tensor, ""] | None
) -> Float[Tensor, "*blocks"]:
    """The values of blocks after rounding.

    Args:
        parts: what ``blocks`` gives.
        grid: of the element.
        blocks: where the blocks lie.
        count: the number of neighbouring blocks that one rotation mixed.
        seed: of the noise of scales; without one it is drawn from torch's default generator.
    """
    largest = blocks.largest(parts)
    relative, shared = relative_scales(largest, grid, peak=EDEN_PEAK, top=EDEN_TOP)
    scaled = parts * (1 / shared / relative)
    rounded = round_to_grid(scaled, grid)
    energy, across = (
        blocks.over_stretches((scaled * other).sum(blocks.dims, keepdim=True), count, "sum")
        for other in (scaled, rounded)
    )
    corrected = relative * torch.where(across == 0, 1.0, energy / across)
    scale = round_to_grid(corrected, ELEMENTS["e4m3"].grid, dither(corrected, seed))
    return rounded * (scale * shared) + largest.amax() * 0
