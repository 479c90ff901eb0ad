"""The kernels themselves. Imported at the first call, because importing Triton takes a moment.

Launch them with ``enable_fp_fusion=False``: a fused multiply-add rounds once less than the formula.
"""

# Triton reads annotations and the source of these functions, so this file keeps to its language.

import triton
import triton.language as tl

from fractrain_fx.formats.affine import scale as affine_scale

__all__ = ["ends", "gains", "measured", "noise_at", "rounded", "rounded_rows", "rows", "whole"]

SMALLEST_SCALE = tl.constexpr(affine_scale.SMALLEST_SCALE)
# The widest range that is not clamped, `torch.finfo(torch.float32).max * (1 - 2**-20)`.
REACH = tl.constexpr(3.402820221199752e38)
# From here on, float32 holds whole numbers only; adding and subtracting it rounds smaller ones, ties to even.
WHOLE = tl.constexpr(8388608.0)
INF = tl.constexpr(float("inf"))


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


@triton.jit
def _nearest(value, width, start, wide, noise, INSIDE: tl.constexpr):
    """``start + scale * round(clamp((value - start) / scale + noise, 0, top))``; the value itself at 0 and 32 bits."""
    top = _top(width)
    scale = _scale(wide, top)
    single = value.to(tl.float32)
    q = tl.div_rn(single - start, scale) + noise
    q = tl.where(q < 0.0, 0.0, q)
    q = whole(tl.where(q > top, top, q))
    level = q * scale + start
    if not INSIDE:
        level = level + 0.0 * single  # the clamp hides an infinite value; 0 * inf is NaN
    return tl.where((width == 0) | (width == 32), value, level.to(value.dtype))


@triton.jit
def _joined(lowest, highest, bad):
    """The lowest and the highest value of a block, or NaN."""
    broken = tl.max(bad, 0) > 0
    lo = tl.where(broken, float("nan"), tl.min(lowest, 0))
    return lo, tl.where(broken, float("nan"), tl.max(highest, 0))


@triton.jit
def _extremes(first, length, BLOCK: tl.constexpr):
    """The lowest and the highest of contiguous values, or NaN if one of them is."""
    lowest = tl.full([BLOCK], INF, tl.float32)
    highest = tl.full([BLOCK], -INF, tl.float32)
    bad = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, length, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        there = at < length
        value = tl.load(first + at, mask=there, other=0.0).to(tl.float32)
        lowest = tl.where(there & (value < lowest), value, lowest)
        highest = tl.where(there & (value > highest), value, highest)
        bad = tl.where(there & (value != value), 1, bad)
    return _joined(lowest, highest, bad)


@triton.jit
def _move(start, wide, run_lo, run_span, seen, weight):
    """``formats.running.move_range``: move a running range to that of a batch, if that is finite."""
    before_lo, before_span, known = tl.load(run_lo), tl.load(run_span), tl.load(seen)
    finite = ((start - start) + (wide - wide)) == 0.0
    share = tl.where(known, weight, 1.0)
    old_lo, old_span = tl.where(known, before_lo, 0.0), tl.where(known, before_span, 0.0)
    tl.store(run_lo, tl.where(finite, old_lo + share * (start - old_lo), before_lo))
    tl.store(run_span, tl.where(finite, old_span + share * (wide - old_span), before_span))
    tl.store(seen, known | finite)


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
    """Round values to the bits and in the range of each."""
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
    nearest = _nearest(value, width, start, wide, noise_at(at, low, high) if NOISY else 0.0, INSIDE)
    if ERASE:
        nearest = tl.where(width == 0, 0.0, nearest)
    tl.store(out + at, nearest, mask=there)


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
    lo, hi = _extremes(x + row.to(tl.int64) * length, length, BLOCK)
    tl.store(start + row, lo)
    tl.store(span + row, _width(lo, hi))


@triton.jit
def rounded_rows(x, out, bits, start, span, length, BLOCK: tl.constexpr):
    """The range of each row of contiguous values, and the row rounded in it to one width."""
    row = tl.program_id(0)
    first = row.to(tl.int64) * length
    lo, hi = _extremes(x + first, length, BLOCK)
    wide, width = _width(lo, hi), tl.load(bits)
    tl.store(start + row, lo)
    tl.store(span + row, wide)
    for begin in range(0, length, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        there = at < length
        value = tl.load(x + first + at, mask=there, other=0.0)
        tl.store(out + first + at, _nearest(value, width, lo, wide, 0.0, True), mask=there)


@triton.jit
def measured(
    x,
    partial,
    finished,
    start,
    span,
    run_lo,
    run_span,
    seen,
    weight,
    count,
    stretch,
    MOVES: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The range of all values, and with ``MOVES`` the running range moved to it.

    Each program stores the extremes of ``stretch`` values, and the last one to do so joins those of all, at most
    ``PARTS``. ``finished`` counts the programs; it is 0 before and after.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    first = program.to(tl.int64) * stretch
    lo, hi = _extremes(x + first, tl.minimum(count - first, stretch).to(tl.int32), BLOCK)
    tl.store(partial + program, lo)
    tl.store(partial + PARTS + program, hi)
    tl.debug_barrier()  # the count, which releases and acquires, comes after both stores
    if tl.atomic_add(finished, 1) == programs - 1:
        at = tl.arange(0, PARTS)
        there = at < programs
        # Volatile, because other programs store these while this one runs.
        lowest = tl.load(partial + at, mask=there, other=INF, volatile=True)
        highest = tl.load(partial + PARTS + at, mask=there, other=-INF, volatile=True)
        lo, hi = _joined(lowest, highest, (lowest != lowest).to(tl.int32))
        wide = _width(lo, hi)
        tl.store(start, lo)
        tl.store(span, wide)
        if MOVES:
            _move(lo, wide, run_lo, run_span, seen, weight)
        tl.store(finished, 0)


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

    ``WIDTHS`` holds six bits for each of ``COUNT`` widths. Those of 0 and 32 bits are 0.
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
        width = tl.full([1], (WIDTHS >> (6 * i)) & 63, tl.int32)
        top = _top(width)
        scale = _scale(wide, top)
        q = tl.div_rn(offset, scale)
        q = tl.where(q < 0.0, 0.0, q)
        if not INSIDE:
            q = tl.where(q > top, top, q)
        level = whole(q) * scale
        if value.dtype != tl.float32:
            level = (level + start).to(value.dtype).to(tl.float32) - start
        error = tl.where(there & (width != 0) & (width != 32), (level - offset) * upstream, 0.0)
        if SQUARED:
            error = error * error
        tl.store(sums + (row.to(tl.int64) * parts + part) * COUNT + i, tl.sum(error, 0))
