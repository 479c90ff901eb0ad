"""The affine rounding itself (ALGORITHM 2), in one form for a CPU and one for other devices and compiled graphs."""

from __future__ import annotations

import torch
from torch import Tensor

from fractrain_fx.formats.affine_grid import SMALLEST_SCALE, Grid
from fractrain_fx.formats.bits import highest_level, readable, unrounded
from fractrain_fx.formats.noise import dither
from fractrain_fx.precision import FLOAT_BITS

__all__ = ["decode_affine", "encode_affine", "round_affine"]

# Samples of at least so many values are rounded one after the other, each in the few passes that one width takes.
_LARGE_SAMPLE = 1 << 15


def round_affine(
    x: Tensor,
    bits: Tensor,
    lo: Tensor,
    span: Tensor,
    *,
    stochastic: bool = False,
    seed: Tensor | None = None,
    inside: bool = False,
    quick: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Round to ``lo + scale * q``, ``q = round(clamp((x - lo) / scale, 0, 2^bits - 1))``, ties to even.

    Args:
        x: values, not empty.
        bits: one width, or one that broadcasts against ``x``; 0 and 32 leave the values as they are.
        lo: low end of the range, of a type at least as wide as that of ``x``; broadcasts against ``x``.
        span: width of the range, likewise.
        stochastic: add noise before rounding.
        seed: of that noise.
        inside: the range was measured on ``x``, so that nothing lies outside and a bad value shows in it.
        quick: in fewer passes, which may round a value within a float32 rounding of a tie to the other side.
        out: memory for the result in the type of ``lo``, where ``x`` has that type.

    Returns:
        The rounded values in the type of ``x``; ``x`` itself where nothing is rounded.
    """
    if not readable(x):
        return _anywhere(x, bits, lo, span, stochastic, seed, inside)
    widths = [int(bits)] if bits.ndim == 0 else bits.flatten().tolist()
    kinds = set(widths)
    if kinds <= {0, FLOAT_BITS}:
        return x
    work, out = (x, out) if x.dtype == lo.dtype else (copied := x.to(lo.dtype), copied)
    noise = dither(work, seed) if stochastic else None
    if len(kinds) > 1 and lo.numel() == 1 and _large_samples(bits, work):
        return _sample_by_sample(work, widths, lo, span, noise, inside, quick, out).to(x.dtype)
    q = Grid(widths[0] if len(kinds) == 1 else bits, lo, span, inside=inside, quick=quick).round(work, noise, out)
    q = (q if inside else _with_bad_values(q, x)).to(x.dtype)
    return q if len(kinds) == 1 else unrounded(bits, x, q)


def encode_affine(
    x: Tensor, bits: Tensor, lo: Tensor, span: Tensor, *, inside: bool = False, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What :func:`round_affine` gives, quickly, at one width of 1 to 8 bits; before it its level numbers (uint8)."""
    if readable(x):
        grid = Grid(int(bits), lo, span, inside=inside, quick=True)
        work, out = (x, out) if x.dtype == lo.dtype else (copied := x.to(lo.dtype), copied)
        q = grid.levels(work, None, out)
        codes = q.to(torch.uint8)
        values = grid.values(q, out=q)
    else:
        codes = _levels(x, bits, lo, span).to(torch.uint8)
        values = decode_affine(codes, bits, lo, span)
    return codes, (values if inside else _with_bad_values(values, x)).to(x.dtype)


def decode_affine(
    codes: Tensor, bits: Tensor, lo: Tensor, span: Tensor, *, inside: bool = False, out: Tensor | None = None
) -> Tensor:
    """The values of levels, in the type of ``lo``: those that were rounded to them, bit for bit."""
    if readable(codes):
        q = codes.to(lo.dtype) if out is None else out.copy_(codes)
        return Grid(int(bits), lo, span, inside=inside, quick=True).values(q, out=q)
    return codes.to(lo.dtype) * _scale(bits, lo, span) + lo


def _large_samples(bits: Tensor, x: Tensor) -> bool:
    """Whether the widths are those of the first dimension, whose entries are large and lie each in one piece."""
    return bits.ndim == x.ndim and bits.numel() == bits.shape[0] and x.is_contiguous() and x[0].numel() >= _LARGE_SAMPLE


def _sample_by_sample(
    x: Tensor,
    widths: list[int],
    lo: Tensor,
    span: Tensor,
    noise: Tensor | None,
    inside: bool,
    quick: bool,
    out: Tensor | None,
) -> Tensor:
    """Each sample by itself, in the passes that one width takes, which then find it in a cache."""
    out = torch.empty_like(x) if out is None else out
    grids = {w: Grid(w, lo, span, inside=inside, quick=quick) for w in set(widths) - {0, FLOAT_BITS}}
    for index, width in enumerate(widths):
        if width not in grids:
            if out is not x:
                out[index] = x[index]
            continue
        q = grids[width].round(x[index], None if noise is None else noise[index], out[index])
        if not inside:
            _with_bad_values(q, x[index])
    return out


def _anywhere(
    x: Tensor,
    bits: Tensor,
    lo: Tensor,
    span: Tensor,
    stochastic: bool,
    seed: Tensor | None,
    inside: bool,
) -> Tensor:
    q = _levels(x, bits, lo, span, stochastic, seed) * _scale(bits, lo, span) + lo
    return unrounded(bits, x, (q if inside else _with_bad_values(q, x)).to(x.dtype))


def _levels(
    x: Tensor, bits: Tensor, lo: Tensor, span: Tensor, stochastic: bool = False, seed: Tensor | None = None
) -> Tensor:
    q = (x.to(lo.dtype) - lo) / _scale(bits, lo, span)
    if stochastic:
        q = q + dither(q, seed)
    highest = highest_level(bits, lo.dtype)
    return q.clamp(min=torch.zeros_like(highest), max=highest).round()


def _scale(bits: Tensor, lo: Tensor, span: Tensor) -> Tensor:
    return (span / highest_level(bits, lo.dtype)).clamp(min=SMALLEST_SCALE)


def _with_bad_values(rounded: Tensor, x: Tensor) -> Tensor:
    """NaN where ``x`` is infinite, which the clamp hides: 0 * inf is NaN."""
    return rounded.add_(x, alpha=0) if readable(rounded) else rounded + 0 * x
