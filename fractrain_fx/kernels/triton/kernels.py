"""The kernels themselves. Imported at the first call, because importing Triton takes a moment.

Launch them with ``enable_fp_fusion=False``: a fused multiply-add rounds once less than the formula.
"""

# Triton reads annotations and the source of these functions, so this file keeps to its language.

import triton
import triton.language as tl

from fractrain_fx.formats.affine import scale as affine_scale

__all__ = ["ends", "gains", "moved", "noise_at", "rounded", "rows", "whole"]

SMALLEST_SCALE = tl.constexpr(affine_scale.SMALLEST_SCALE)
# The widest range that is not clamped, `torch.finfo(torch.float32).max * (1 - 2**-20)`.
REACH = tl.constexpr(3.402820221199752e38)
# From here on, float32 holds whole numbers only; adding and subtracting it rounds smaller ones, ties to even.
WHOLE = tl.constexpr(8388608.0)


@triton.jit
def _top(bits):
    """Number of the highest level."""
    top = (tl.full([1], 1, tl.int64) << bits.to(tl.int64)) - 1
    return tl.where(top < 1, 1, top).to(tl.float32)


@triton.jit
def _scale(span, top):
    """Distance between levels. A comparison with NaN is false, so that NaN stays."""
    scale = tl.div_rn(span, top)
    return tl.where(scale < SMALLEST_SCALE, SMALLEST_SCALE, scale)


@triton.jit
def whole(q):
    """The nearest whole number to a value of at least 0."""
    return tl.where(q < WHOLE, (q + WHOLE) - WHOLE, q)


@triton.jit
def noise_at(position, low, high):
    """``formats/noise.py: hashed``: uniform in -0.5..0.5, from a position and a seed."""
    h = position.to(tl.uint32) ^ low.to(tl.uint32)
    h = (h ^ (h >> 16)) * tl.full([1], 0x7FEB352D, tl.uint32) + high.to(tl.uint32)
    h = (h ^ (h >> 15)) * tl.full([1], 0x846CA68B, tl.uint32)
    return (h.to(tl.int32, bitcast=True) >> 8).to(tl.float32) * 0.000000059604644775390625  # 2^-24


@triton.jit
def _width(lo, hi):
    """``affine.format: range_between``: the width of a range, NaN if an end is not finite."""
    span = hi - lo
    return tl.where(span > REACH, REACH, span) + (hi - hi) + (lo - lo)


@triton.jit(do_not_specialize=["low", "high"])
def rounded(
    x,
    out,
    bits,
    lo,
    span,
    count,
    bits_inner,
    bits_count,
    range_inner,
    range_count,
    low,
    high,
    NOISY: tl.constexpr,
    INSIDE: tl.constexpr,
    ERASE: tl.constexpr,
    ONE_WIDTH: tl.constexpr,
    ONE_RANGE: tl.constexpr,
    LONG: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``lo + scale * round(clamp((x - lo) / scale + noise, 0, top))``; ``x`` itself at 0 and 32 bits."""
    at = tl.program_id(0).to(tl.int64) * BLOCK if LONG else tl.program_id(0) * BLOCK
    at = at + tl.arange(0, BLOCK)
    there = at < count
    value = tl.load(x + at, mask=there, other=0.0)
    if ONE_WIDTH:
        width = tl.load(bits)
    else:
        width = tl.load(bits + (at // bits_inner) % bits_count, mask=there, other=0)
    if ONE_RANGE:
        start, wide = tl.load(lo), tl.load(span)
    else:
        entry = (at // range_inner) % range_count
        start = tl.load(lo + entry, mask=there, other=0.0)
        wide = tl.load(span + entry, mask=there, other=0.0)
    top = _top(width)
    scale = _scale(wide, top)
    single = value.to(tl.float32)
    q = tl.div_rn(single - start, scale)
    if NOISY:
        q = q + noise_at(at, low, high)
    q = tl.where(q < 0.0, 0.0, q)
    q = whole(tl.where(q > top, top, q))
    found = q * scale + start
    if not INSIDE:
        found = found + 0.0 * single  # the clamp hides an infinite value; 0 * inf is NaN
    found = found.to(value.dtype)
    found = tl.where((width == 0) | (width == 32), value, found)
    if ERASE:
        found = tl.where(width == 0, 0.0, found)
    tl.store(out + at, found, mask=there)


@triton.jit
def ends(lo, hi, start, span, count, BLOCK: tl.constexpr):
    """Ranges from the lowest and highest values."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    lowest = tl.load(lo + at, mask=there, other=0.0).to(tl.float32)
    highest = tl.load(hi + at, mask=there, other=0.0).to(tl.float32)
    tl.store(start + at, lowest, mask=there)
    tl.store(span + at, _width(lowest, highest), mask=there)


@triton.jit
def rows(x, start, span, length, BLOCK: tl.constexpr):
    """The range of each row of contiguous values."""
    row = tl.program_id(0)
    first = x + row.to(tl.int64) * length
    lowest = tl.full([BLOCK], float("inf"), tl.float32)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    bad = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, length, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        there = at < length
        value = tl.load(first + at, mask=there, other=0.0).to(tl.float32)
        lowest = tl.where(there & (value < lowest), value, lowest)
        highest = tl.where(there & (value > highest), value, highest)
        bad = tl.where(there & (value != value), 1, bad)
    broken = tl.max(bad, 0) > 0
    found_lo = tl.where(broken, float("nan"), tl.min(lowest, 0))
    found_hi = tl.where(broken, float("nan"), tl.max(highest, 0))
    tl.store(start + row, found_lo)
    tl.store(span + row, _width(found_lo, found_hi))


@triton.jit
def moved(lo, span, run_lo, run_span, seen, weight):
    """``nn/ranges.py: RunningRange``: move the running range to that of a batch, if that is finite."""
    start, wide = tl.load(lo), tl.load(span)
    before_lo, before_span, known = tl.load(run_lo), tl.load(run_span), tl.load(seen)
    finite = ((start - start) + (wide - wide)) == 0.0
    share = tl.where(known, weight, 1.0)
    old_lo, old_span = tl.where(known, before_lo, 0.0), tl.where(known, before_span, 0.0)
    tl.store(run_lo, tl.where(finite, old_lo + share * (start - old_lo), before_lo))
    tl.store(run_span, tl.where(finite, old_span + share * (wide - old_span), before_span))
    tl.store(seen, known | finite)


@triton.jit
def gains(
    x,
    g,
    lo,
    span,
    sums,
    length,
    parts,
    WIDTHS: tl.constexpr,
    COUNT: tl.constexpr,
    INSIDE: tl.constexpr,
    SQUARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums of ``g * (Q(x) - x)``, or of its squares, over each part of each row, one for each of some widths.

    ``WIDTHS`` holds six bits for each of ``COUNT`` widths.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    there = at < length
    first = row.to(tl.int64) * length
    value = tl.load(x + first + at, mask=there, other=0.0)
    upstream = tl.load(g + first + at, mask=there, other=0.0).to(tl.float32)
    start, wide = tl.load(lo), tl.load(span)
    offset = value.to(tl.float32) - start
    for i in tl.static_range(COUNT):
        top = _top(tl.full([1], (WIDTHS >> (6 * i)) & 63, tl.int32))
        scale = _scale(wide, top)
        q = tl.div_rn(offset, scale)
        q = tl.where(q < 0.0, 0.0, q)
        if not INSIDE:
            q = tl.where(q > top, top, q)
        found = whole(q) * scale
        if value.dtype != tl.float32:
            found = (found + start).to(value.dtype).to(tl.float32) - start
        error = tl.where(there, (found - offset) * upstream, 0.0)
        if SQUARED:
            error = error * error
        tl.store(sums + (row.to(tl.int64) * parts + part) * COUNT + i, tl.sum(error, 0))
