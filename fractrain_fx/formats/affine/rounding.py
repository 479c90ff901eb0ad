"""The affine rounding, in one form for a CPU and in another for other devices and compiled graphs."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from fractrain_fx.config.precision import FLOAT_BITS
from fractrain_fx.formats.affine.grid import SMALLEST_SCALE, Grid
from fractrain_fx.formats.affine.kernels import code_ends_compiled, encode_compiled, has_kernels, round_compiled
from fractrain_fx.formats.affine.triton import has_triton, round_by_triton
from fractrain_fx.formats.base import ValueRange
from fractrain_fx.formats.bits import highest_level, is_rounded, once, readable, unrounded
from fractrain_fx.formats.noise import dither, noise_number

__all__ = ["bits_in_use", "code_ends", "codes_affine", "round_affine", "shifted_to_zero", "values_affine"]

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
    compiled: bool = False,
    triton: bool = False,
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
        compiled: use the C++ kernel if it takes the values; it is quicker still and rounds as the formula says.
        triton: use the Triton kernel if it takes them. It gives the numbers of plain operations on a GPU, but for the
            noise, which is a hash, as in compiled graphs.
        out: memory for the result in the type of the range; used only if ``x`` has that type.

    Returns:
        The rounded values in the type of ``x``; ``x`` itself if nothing is rounded.
    """
    if not readable(x):
        if triton and has_triton(x, *within[:2]):
            rounded = round_by_triton(x, bits, within, noise=noise_number(stochastic, seed))
            if rounded is not None:
                return rounded
        return _anywhere(x, bits, within, stochastic, seed)
    dtype = within.lo.dtype

    def by_kernel(values: Tensor, out: Tensor | None) -> Tensor | None:
        if not compiled or not has_kernels(values, within.lo):
            return None
        return round_compiled(values, bits, within, stochastic=stochastic, seed=seed, out=out)

    if x.dtype == dtype and (rounded := by_kernel(x, out)) is not None:
        return rounded
    widths = [int(bits)] if bits.ndim == 0 else bits.flatten().tolist()
    kinds = set(widths)
    if kinds <= {0, FLOAT_BITS}:
        return x
    work = x
    if x.dtype != dtype:
        work = out = x.to(dtype)
        if (rounded := by_kernel(work, out)) is not None:
            return rounded.to(x.dtype)
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
    scale, lo = _scale(bits, within), within.lo
    shifted = torch.where(is_rounded(bits), (lo / scale).round() * scale, lo)
    return ValueRange(shifted, within.span.expand_as(shifted).contiguous())


def bits_in_use(bits: Int[Tensor, "*bits"], span: Tensor) -> Int[Tensor, "*bits"]:
    """The fewest bits, at most ``bits``, that round values of a range of this width to the same levels.

    In a narrow range the scale is at its lower bound, and the upper levels lie outside the range. Codes of fewer bits
    then lie around the values in use: the value of code 0 is not far from them, where float32 would hold it less
    exactly than they are.

    Args:
        bits: widths.
        span: width of the range that all values lie in, a number. Noise moves a value by at most one level.
    """
    enough = ((span.double() / SMALLEST_SCALE).floor() + 3).log2().ceil()
    fewer = torch.fmin(bits.double(), enough).to(bits.dtype)  # a range that is not finite changes nothing
    return torch.where(is_rounded(bits), fewer, bits)


def codes_affine(
    x: Tensor,
    bits: Tensor,
    within: ValueRange,
    *,
    dtype: torch.dtype,
    stochastic: bool = False,
    seed: Tensor | None = None,
    compiled: bool = False,
    values: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The codes of the values that :func:`round_affine` gives with ``quick=True``, and those values if asked for.

    Args:
        x: values of the type of the range, not empty.
        bits: as :func:`round_affine` takes them, like all arguments that are not explained here.
        within: the range.
        dtype: type of the codes, int8 or int16: the numbers of levels minus ``2^(bits - 1)``. The codes for 0 and 32
            bits mean nothing.
        stochastic: add noise before rounding.
        seed: the noise's seed.
        compiled: use the C++ kernel if it takes the values.
        values: whether to give the rounded values too.
        out: memory to work in, also for the rounded values, in the type of ``x``.

    Returns:
        Codes, and the rounded values or ``None``.
    """
    if compiled and has_kernels(x, within.lo):
        codes = torch.empty_like(x, dtype=dtype)
        out = (torch.empty_like(x) if out is None else out) if values else None
        if encode_compiled(x, bits, within, codes, out, stochastic=stochastic, seed=seed):
            return codes, out
    if readable(x):
        noise = dither(x, seed) if stochastic else None
        q = torch.empty_like(x) if out is None else out
        for place, grid in _parts(x, bits, bits.flatten().tolist(), within, True):
            grid.levels(x[place], None if noise is None else noise[place], q[place])
    else:
        q = _levels(x, bits, within, _scale(bits, within), stochastic, seed)
    codes = (q - _middle(bits)).to(dtype)
    if not values:
        return codes, None
    found = values_affine(q, bits, within, compiled=compiled)
    return codes, unrounded(bits, x, found if within.measured_here else _with_bad_values(found, x))


def code_ends(bits: Tensor, within: ValueRange, *, compiled: bool = False) -> tuple[Tensor, Tensor]:
    """Scale and zero of signed codes, ``value = scale * code + zero``; the zero is NaN if the range is not finite."""
    lo, span, _ = within
    if compiled and has_kernels(lo):
        return code_ends_compiled(bits, lo, span)
    scale = _scale(bits, within)
    return scale, lo + scale * _middle(bits) + 0 * span


def values_affine(q: Tensor, bits: Tensor, within: ValueRange, *, compiled: bool = False) -> Tensor:
    """The values of the levels ``q`` (which may be written into), bit for bit as :func:`round_affine` gives them.

    Args:
        q: numbers of levels, in the type of the range.
        bits: as :func:`round_affine` takes them.
        within: the range.
        compiled: whether C++ kernels rounded, which compute as the formula says.
    """
    if not readable(q):
        return q * _scale(bits, within) + within.lo
    for place, grid in _parts(q, bits, bits.flatten().tolist(), within, not compiled):
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


def _anywhere(x: Tensor, bits: Tensor, within: ValueRange, stochastic: bool, seed: Tensor | None) -> Tensor:
    scale = _scale(bits, within)
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


def _scale(bits: Tensor, within: ValueRange) -> Tensor:
    """Distance between levels."""
    return once((within.span / highest_level(bits, within.lo.dtype)).clamp(min=SMALLEST_SCALE))


def _with_bad_values(rounded: Tensor, x: Tensor) -> Tensor:
    """``rounded``, but NaN where ``x`` is infinite, which the clamp hides: 0 * inf is NaN."""
    return rounded.add_(x, alpha=0) if readable(rounded) else rounded + 0 * x
