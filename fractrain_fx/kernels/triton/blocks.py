"""The kernel of the block formats. Imported at the first call, because importing Triton takes a moment.

Launch it with ``enable_fp_fusion=False``: a fused multiply-add rounds once less than the formula.
"""

# Triton reads annotations and the source of these functions, so this file keeps to its language.

import triton
import triton.language as tl

from fractrain_fx.kernels.triton.kernels import noise_at, whole

__all__ = ["blocks_rounded"]

# The smallest normal float32 number, and the largest but for one part in 2^24 (`formats/microscaling/scales.py`).
TINY = tl.constexpr(1.1754943508222875e-38)
REACH = tl.constexpr(3.4028232635612047e38)
# The largest bfloat16 number.
BFLOAT16 = tl.constexpr(3.3895313892515355e38)
INF = tl.constexpr(float("inf"))


@triton.jit
def _rounded(value, relative, smallest, largest, noise):
    """``elements.round_to_grid``: the nearest value of a grid, ties to even. A comparison with NaN is false."""
    step = (value.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    step = tl.where(step < smallest, smallest, step) * relative
    steps = tl.div_rn(value, step) + noise
    size = whole(tl.abs(steps)) * step
    size = tl.where(size > largest, largest, size)
    return tl.where(steps < 0.0, -size, size)


@triton.jit
def _power(exponent):
    """``2^exponent`` for -127 to 127."""
    bits = tl.where(exponent < -126, 1 << 22, (exponent + 127) << 23)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _of_width(width, W0, V0, W1, V1, V2):
    """A number of the element that a width selects."""
    return tl.where(width == W0, V0, tl.where(width == W1, V1, V2))


@triton.jit
def _capped(up, largest):
    return tl.where(up * largest == INF, tl.div_rn(REACH, largest), up)


@triton.jit(do_not_specialize=["low", "high"])
def blocks_rounded(
    x,
    out,
    bits,
    most,
    tensor_most,
    count,
    A,
    M,
    B,
    I,  # noqa: E741
    bits_inner,
    bits_count,
    low,
    high,
    W0: tl.constexpr,
    R0: tl.constexpr,
    S0: tl.constexpr,
    L0: tl.constexpr,
    T0: tl.constexpr,
    W1: tl.constexpr,
    R1: tl.constexpr,
    S1: tl.constexpr,
    L1: tl.constexpr,
    T1: tl.constexpr,
    R2: tl.constexpr,
    S2: tl.constexpr,
    L2: tl.constexpr,
    T2: tl.constexpr,
    KIND: tl.constexpr,
    MEASURED: tl.constexpr,
    NOISY: tl.constexpr,
    ONE_WIDTH: tl.constexpr,
    LONG: tl.constexpr,
    ROWS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
):
    """Round blocks of ``FIRST x SECOND`` values along the axes ``A`` and ``B`` of memory ``[outer, A, M, B, I]``.

    ``KIND`` of the scales: 0 ``e8m0``, 1 ``e4m3``, 2 ``float32``. ``MEASURED``: ``most`` holds the largest size for
    each outer and inner index; otherwise each block measures its own. ``W``, ``R``, ``S``, ``L`` and ``T`` are width,
    relative step, smallest normal number, largest number and its exponent of up to three elements.
    """
    block = tl.program_id(0).to(tl.int64) * ROWS if LONG else tl.program_id(0) * ROWS
    block = (block + tl.arange(0, ROWS))[:, None]
    along_a, along_b = tl.cdiv(A, FIRST), tl.cdiv(B, SECOND)
    inner, rest = block % I, block // I
    piece_b, rest = rest % along_b, rest // along_b
    middle, rest = rest % M, rest // M
    piece_a, outer = rest % along_a, rest // along_a
    place = tl.arange(0, FIRST * SECOND)[None, :]
    a, b = piece_a * FIRST + place // SECOND, piece_b * SECOND + place % SECOND
    there = (block < count) & (a < A) & (b < B)
    at = (((outer * A + a) * M + middle) * B + b) * I + inner
    value = tl.load(x + at, mask=there, other=0.0)
    single = value.to(tl.float32)
    if MEASURED:
        largest = tl.load(most + outer * I + inner, mask=block < count, other=0.0).to(tl.float32)
    else:
        size = tl.abs(single)
        bad = tl.max(tl.where((size != size) | (size == INF), 1, 0), 1)
        peak = tl.max(tl.where(size == size, size, 0.0), 1)
        largest = tl.where(bad > 0, float("nan"), peak)[:, None]
    if ONE_WIDTH:
        width = tl.load(bits)
    else:
        width = tl.load(bits + (at // bits_inner) % bits_count, mask=there, other=0)
    relative, smallest = _of_width(width, W0, R0, W1, R1, R2), _of_width(width, W0, S0, W1, S1, S2)
    highest, top = _of_width(width, W0, L0, W1, L1, L2), _of_width(width, W0, T0, W1, T1, T2)
    poison = largest * 0.0  # NaN for a NaN or infinite block
    if KIND == 0:
        exponent = ((largest.to(tl.int32, bitcast=True) >> 23) & 255) - 127 - top
        exponent = tl.where(exponent < -127, -127, tl.where(exponent > 126, 126, exponent))
        down, up = _power(-exponent), _power(exponent) + poison
    elif KIND == 1:
        whole_tensor = tl.load(tensor_most).to(tl.float32)
        of_tensor = tl.div_rn(whole_tensor, highest * 448.0)
        of_tensor = tl.where(of_tensor < TINY, TINY, of_tensor)
        least = tl.div_rn(TINY, of_tensor)
        least = tl.where(least < 0.015625, 0.015625, least)
        share = tl.div_rn(tl.div_rn(largest, highest), of_tensor)
        share = tl.where(share < least, least, share)
        share = tl.where(share > 448.0, 448.0, share)
        share = _rounded(share, 0.125, 0.015625, 448.0, 0.0)
        down = tl.div_rn(tl.div_rn(1.0, of_tensor), share)
        up = _capped(of_tensor * share, highest) + whole_tensor * 0.0
    else:
        up = tl.div_rn(largest, highest)
        up = tl.where(up < TINY, TINY, up)
        down = tl.div_rn(1.0, up)
        up = _capped(up, highest) + poison
    noise = noise_at(at, low, high) if NOISY else 0.0
    rounded = (_rounded(single * down, relative, smallest, highest, noise) * up).to(value.dtype)
    half = _rounded(single, 0.0078125, TINY, BFLOAT16, 0.0) + 0.0 * single
    rounded = tl.where(width == 16, half.to(value.dtype), rounded)
    tl.store(out + at, tl.where((width == 0) | (width == 32), value, rounded), mask=there)
