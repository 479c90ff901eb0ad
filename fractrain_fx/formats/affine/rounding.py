"""The affine rounding, in one form for a CPU and in another for other devices and compiled graphs."""

from __future__ import annotations

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
        out: memory for the result in the type of the range; used only if ``x`` has that type.

    Returns:
        The rounded values in the type of ``x``; ``x`` itself if nothing is rounded.
    """
    if not readable(x):
        return round_on_any_tensor(x, bits, within, stochastic, seed)
    widths = set(bits.flatten().tolist())
    if widths <= {0, FLOAT_BITS}:
        return x
    work = x
    if x.dtype != within.lo.dtype:
        work = out = x.to(within.lo.dtype)
    noise = dither(work, seed) if stochastic else None
    rounded = Grid(bits, within).round(work, noise, out)
    if not within.measured_here:
        _with_bad_values(rounded, x)
    rounded = rounded.to(x.dtype)
    return rounded if len(widths) == 1 else unrounded(bits, x, rounded)


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
    """The codes of the values that :func:`round_affine` gives, in int8.

    Args:
        x: values of the type of the range, not empty.
        bits: as :func:`round_affine` takes them, at most 8.
        within: the range.

    Returns:
        The numbers of levels minus ``2^(bits - 1)``. The codes for 0 and 32 bits mean nothing.
    """
    if readable(x):
        q = Grid(bits, within).levels(x, None, None)
    else:
        q = _levels(x, bits, within, once(scales(within.span, bits)))
    return (q - _middle(bits)).to(torch.int8)


def values_affine(q: Tensor, bits: Tensor, within: ValueRange) -> Tensor:
    """The values of the levels ``q`` (which may be written into), bit for bit as :func:`round_affine` gives them.

    Args:
        q: numbers of levels, in the type of the range.
        bits: as :func:`round_affine` takes them.
        within: the range.
    """
    if not readable(q):
        return q * once(scales(within.span, bits)) + within.lo
    return Grid(bits, within).values(q, out=q)


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
