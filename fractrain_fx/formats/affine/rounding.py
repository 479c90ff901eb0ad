"""The affine rounding, in one form for a CPU and in another for other devices and compiled graphs."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from fractrain_fx.config.precision import FLOAT_BITS
from fractrain_fx.formats.affine.grid import Grid
from fractrain_fx.formats.affine.scale import scales
from fractrain_fx.formats.base import Reach, ValueRange
from fractrain_fx.formats.bits import highest_level, is_rounded, once, readable, unrounded
from fractrain_fx.formats.noise import dither

__all__ = ["codes_affine", "reach_affine", "round_affine", "round_on_any_tensor", "shifted_to_zero", "values_affine"]

# Samples of at least this many values are rounded one after the other: one width takes fewer passes than several.
_LARGE_SAMPLE = 1 << 15


def round_affine(
    x: Tensor,
    bits: Tensor,
    within: ValueRange,
    *,
    stochastic: bool = False,
    seed: Tensor | None = None,
    quick: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Round to ``lo + scale * q``, ``q = round(clamp((x - lo) / scale, 0, 2^bits - 1))``, ties to even.

    Args:
        x: values, not empty.
        bits: one width, or widths that broadcast against ``x``; 0 and 32 leave the values as they are.
        within: the range, of a type at least as wide as that of ``x``; its ends broadcast against ``x``.
        stochastic: add noise before rounding.
        seed: the noise's seed.
        quick: take fewer passes; a value within a float32 rounding of a tie may then go to the other level.
        out: memory for the result in the type of the range; used only if ``x`` has that type.

    Returns:
        The rounded values in the type of ``x``; ``x`` itself if nothing is rounded.
    """
    if not readable(x):
        return round_on_any_tensor(x, bits, within, stochastic, seed)
    widths = [int(bits)] if bits.ndim == 0 else bits.flatten().tolist()
    kinds = set(widths)
    if kinds <= {0, FLOAT_BITS}:
        return x
    work = x
    if x.dtype != within.lo.dtype:
        work = out = x.to(within.lo.dtype)
    noise = dither(work, seed) if stochastic else None
    parts = _parts(work, bits, widths, within, quick)
    if out is None and parts[0][0] is not ...:
        out = torch.empty_like(work)
    for place, grid in parts:
        q = grid.round(work[place], None if noise is None else noise[place], None if out is None else out[place])
        if not within.measured_here:
            _with_bad_values(q, x[place])
    q = (q if out is None else out).to(x.dtype)
    return q if len(kinds) == 1 else unrounded(bits, x, q)


def shifted_to_zero(bits: Int[Tensor, "*bits"], within: ValueRange) -> ValueRange:
    """The range, moved by at most half a level, so that its low end is a multiple of the scale.

    There is one low end for each entry of ``bits``, because their scales differ. Values that then lie outside the
    range, by at most half a level, are rounded to the level at that end.
    """
    scale, lo = once(scales(within.span, bits)), within.lo
    shifted = torch.where(is_rounded(bits), (lo / scale).round() * scale, lo)
    return ValueRange(shifted, within.span.expand_as(shifted).contiguous())


def reach_affine(bits: Int[Tensor, "*bits"], within: ValueRange) -> Reach:
    """The ends of the range, unless it was measured on the values, and the values nearest to the level of 0."""
    scale, rounds = scales(within.span, bits), is_rounded(bits)
    level = (-within.lo / scale).round().clamp(min=0).minimum(highest_level(bits, within.lo.dtype))
    zero = torch.where(rounds, level * scale + within.lo, torch.nan)
    ends = None
    if not within.measured_here:
        ends = (
            torch.where(rounds, within.lo, -torch.inf),
            torch.where(rounds, within.lo + within.span, torch.inf),
        )
    return Reach(ends, (zero - scale / 2, zero + scale / 2))


def codes_affine(x: Tensor, bits: Tensor, within: ValueRange) -> Tensor:
    """The codes of the values that :func:`round_affine` gives with ``quick=True``, in int8.

    Args:
        x: values of the type of the range, not empty.
        bits: as :func:`round_affine` takes them, at most 8.
        within: the range.

    Returns:
        The numbers of levels minus ``2^(bits - 1)``. The codes for 0 and 32 bits mean nothing.
    """
    if readable(x):
        q = torch.empty_like(x)
        for place, grid in _parts(x, bits, bits.flatten().tolist(), within, True):
            grid.levels(x[place], None, q[place])
    else:
        q = _levels(x, bits, within, once(scales(within.span, bits)))
    return (q - _middle(bits)).to(torch.int8)


def values_affine(q: Tensor, bits: Tensor, within: ValueRange, *, quick: bool) -> Tensor:
    """The values of the levels ``q`` (which may be written into), bit for bit as :func:`round_affine` gives them.

    Args:
        q: numbers of levels, in the type of the range.
        bits: as :func:`round_affine` takes them.
        within: the range.
        quick: as :func:`round_affine` takes it.
    """
    if not readable(q):
        return q * once(scales(within.span, bits)) + within.lo
    for place, grid in _parts(q, bits, bits.flatten().tolist(), within, quick):
        part = q[place]
        grid.values(part, out=part)
    return q


def _large_samples(bits: Tensor, x: Tensor) -> bool:
    """Whether the widths belong to the entries of the first dimension, each of which is large and contiguous."""
    return bits.ndim == x.ndim and bits.numel() == bits.shape[0] and x.is_contiguous() and x[0].numel() >= _LARGE_SAMPLE


def _parts(x: Tensor, bits: Tensor, widths: list[int], within: ValueRange, quick: bool) -> list[tuple[Any, Grid]]:
    """The grid for each part of ``x``, with the part's index; parts of 0 and 32 bits are left out if that saves work.

    Each large sample is a part: one width takes fewer passes, and all but the first find the sample in a cache.
    """
    kinds = set(widths)
    if len(kinds) > 1 and within.lo.numel() == 1 and _large_samples(bits, x):
        grids = {width: Grid(width, within, quick=quick) for width in kinds - {0, FLOAT_BITS}}
        return [(index, grids[width]) for index, width in enumerate(widths) if width in grids]
    return [(..., Grid(widths[0] if len(kinds) == 1 else bits, within, quick=quick))]


def round_on_any_tensor(x: Tensor, bits: Tensor, within: ValueRange, stochastic: bool, seed: Tensor | None) -> Tensor:
    """:func:`round_affine` by operations that read no value, for tensors without values and for compiled graphs."""
    scale = once(scales(within.span, bits))
    q = _levels(x, bits, within, scale, stochastic, seed) * scale + within.lo
    return unrounded(bits, x, (q if within.measured_here else _with_bad_values(q, x)).to(x.dtype))


def _levels(
    x: Tensor,
    bits: Tensor,
    within: ValueRange,
    scale: Tensor,
    stochastic: bool = False,
    seed: Tensor | None = None,
) -> Tensor:
    lo = within.lo
    q = (x.to(lo.dtype) - lo) / scale
    if stochastic:
        q = q + dither(q, seed)
    if not within.measured_here:  # in a measured range noise moves a value at most half a level below 0: rounds to 0
        q = q.clamp(min=0)
    return torch.minimum(q, once(highest_level(bits, lo.dtype))).round()


def _middle(bits: Tensor) -> Tensor:
    """The level whose signed code is 0. It is the middle one, so that corrections are small, also at 2 bits."""
    return (1 << (bits.long() - 1).clamp(min=0)).to(torch.float32)


def _with_bad_values(rounded: Tensor, x: Tensor) -> Tensor:
    """``rounded``, but NaN where ``x`` is infinite, which the clamp hides: 0 * inf is NaN."""
    return rounded.add_(x, alpha=0) if readable(rounded) else rounded + 0 * x
