"""The affine rounding, its codes, and how far its levels reach."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from fractrain_fx.formats.affine.scale import levels_of
from fractrain_fx.formats.base import Reach, ValueRange
from fractrain_fx.formats.bits import is_rounded, only_unrounded, readable, unrounded
from fractrain_fx.formats.noise import dither

__all__ = ["codes_affine", "reach_affine", "round_affine", "shifted_to_zero", "values_affine"]


def round_affine(
    x: Tensor,
    bits: Tensor,
    within: ValueRange,
    *,
    stochastic: bool = False,
    seed: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Round to ``lo + scale * q``, ``q = round(clamp((x - lo) / scale, 0, 2^bits - 1))``, ties to even.

    Args:
        x: values, not empty.
        bits: one width, or widths that broadcast against ``x``; 0 and 32 leave the values as they are.
        within: the range, of a type at least as wide as that of ``x``; its ends broadcast against ``x``.
        stochastic: add noise before rounding.
        seed: the noise's seed.
        out: memory for the result in the type of the range.

    Returns:
        The rounded values in the type of ``x``; ``x`` itself if nothing is rounded.
    """
    if readable(x) and only_unrounded(bits):
        return x
    levels, work = levels_of(within, bits), x.to(within.lo.dtype)
    rounded = levels.values(levels.nearest(work, dither(work, seed) if stochastic else None, out))
    if not within.measured_here:
        rounded.add_(x, alpha=0)  # the clamp hides an infinite value; 0 * inf is NaN
    return unrounded(bits, x, rounded.to(x.dtype))


def shifted_to_zero(bits: Int[Tensor, "*bits"], within: ValueRange) -> ValueRange:
    """The range, moved by at most half a level, so that its low end is a multiple of the scale.

    There is one low end for each entry of ``bits``, because their scales differ. Values that then lie outside the
    range, by at most half a level, are rounded to the level at that end.
    """
    levels = levels_of(within, bits)
    shifted = torch.where(is_rounded(bits), -levels.zero.round() * levels.scale, levels.lo)
    return ValueRange(shifted, within.span.expand_as(shifted).contiguous())


def reach_affine(bits: Int[Tensor, "*bits"], within: ValueRange) -> Reach:
    """The ends of the range, unless it was measured on the values, and the values nearest to the level of 0."""
    levels, rounds = levels_of(within, bits), is_rounded(bits)
    zero, half = torch.where(rounds, levels.values(levels.zero_level), torch.nan), levels.scale / 2
    ends = None
    if not within.measured_here:
        ends = (
            torch.where(rounds, within.lo, -torch.inf),
            torch.where(rounds, within.lo + within.span, torch.inf),
        )
    return Reach(ends, (zero - half, zero + half))


def codes_affine(x: Tensor, bits: Tensor, within: ValueRange) -> Tensor:
    """The codes of the values that :func:`round_affine` gives, in int8.

    Args:
        x: values of the type of the range, not empty.
        bits: as :func:`round_affine` takes them, at most 8.
        within: the range.

    Returns:
        The numbers of levels minus ``2^(bits - 1)``. The codes for 0 and 32 bits mean nothing.
    """
    middle = (1 << (bits.long() - 1).clamp(min=0)).to(torch.float32)
    return (levels_of(within, bits).nearest(x) - middle).to(torch.int8)


def values_affine(q: Tensor, bits: Tensor, within: ValueRange) -> Tensor:
    """The values of the levels ``q`` (which may be written into), bit for bit as :func:`round_affine` gives them.

    Args:
        q: numbers of levels, in the type of the range.
        bits: as :func:`round_affine` takes them.
        within: the range.
    """
    return levels_of(within, bits).values(q)
