"""Launches the kernels on tensors. The numbers are those of the plain operations, up to the order of sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fractrain_fx.formats.base import ValueRange
from fractrain_fx.kernels.triton.fit import on_device, place, stored

__all__ = ["EXACT", "LONG", "gains_by_triton", "measure_by_triton", "move_by_triton", "round_by_triton"]

# Values of one program.
_BLOCK = 1024
# Of the gate's gradient, which takes several widths of each value, and writes a number for each block.
_LARGE_BLOCK = 4096
# From this number of values on, 32 bits do not count them.
LONG = 1 << 31
EXACT: dict[str, Any] = {"enable_fp_fusion": False}


def round_by_triton(
    x: Tensor,
    bits: Tensor,
    within: ValueRange,
    *,
    noise: int | None = None,
    erase: bool = False,
) -> Tensor | None:
    """Round like :func:`~fractrain_fx.formats.affine.rounding.round_affine`, in one launch.

    The noise is the hash of compiled graphs, of each value's position in memory.

    Args:
        x: values.
        bits: one width, or widths that broadcast against ``x``.
        within: the range; its ends broadcast against ``x``.
        noise: its seed; ``None``: no noise.
        erase: whether values of 0 bits become 0 instead of staying as they are.

    Returns:
        The rounded values, in the type of ``x``; ``None`` if bits or ranges differ along several dimensions.
    """
    from fractrain_fx.kernels.triton.kernels import rounded

    x = stored(x)
    of_bits, of_range = place(bits, x), place(within.lo, x)
    if of_bits is None or of_range is None or within.lo.shape != within.span.shape:
        return None
    out, count = torch.empty_like(x), x.numel()
    low, high = (0, 0) if noise is None else (noise & 0x7FFFFFFF, (noise >> 31) & 0x7FFFFFFF)
    ends = within.lo, within.span
    single = bits.numel() == 1, within.lo.numel() == 1
    kinds = noise is not None, within.measured_here, erase, *single, count >= LONG
    with on_device(x):
        rounded[_programs(count),](x, out, bits, *ends, count, *of_bits, *of_range, low, high, *kinds, _BLOCK, **EXACT)
    return out


def measure_by_triton(x: Tensor, dim: int | None, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Low end and width of the range of ``x``, as :func:`~fractrain_fx.formats.affine.measure` finds them.

    Args:
        x: values.
        dim: one range for each index of this dimension, or ``None``.
        shape: of both results.
    """
    from fractrain_fx.kernels.triton.kernels import ends, rows

    lo = torch.empty(shape, dtype=torch.float32, device=x.device)
    span = torch.empty_like(lo)
    with on_device(x):
        if dim is not None and dim % x.ndim == 0 and x.is_contiguous():
            rows[lo.numel(),](x, lo, span, x.numel() // len(x), _BLOCK, **EXACT)
            return lo, span
        if dim is None:
            dense = stored(x)
            lowest, highest = torch.aminmax(x if x.is_contiguous() else dense.as_strided((x.numel(),), (1,)))
        else:
            others = [each for each in range(x.ndim) if each != dim % x.ndim]
            lowest, highest = (x.amin(others), x.amax(others)) if others else (x.contiguous(),) * 2
        ends[_programs(lo.numel()),](lowest, highest, lo, span, lo.numel(), _BLOCK, **EXACT)
    return lo, span


def move_by_triton(within: tuple[Tensor, Tensor], running: tuple[Tensor, Tensor, Tensor], weight: float) -> None:
    """Move a running range (low end, width, and whether any batch has filled it) to that of a batch, in place."""
    from fractrain_fx.kernels.triton.kernels import moved

    with on_device(within[0]):
        moved[1,](*within, *running, weight, **EXACT)
    torch.autograd.graph.increment_version(running)


def gains_by_triton(
    x: Tensor, g: Tensor, widths: Sequence[int], within: ValueRange, *, squared: bool = False
) -> Tensor:
    """For each sample and each width, the sum of ``g * (Q(x) - x)``, or of its squares.

    Args:
        x: values, samples first.
        g: gradient of the rounded values.
        widths: distinct widths that round.
        within: the range, one for all values.
        squared: sum the squares.
    """
    from fractrain_fx.kernels.triton.kernels import gains

    length = x.numel() // len(x)
    by_sample = g.stride() == x.stride() and x.stride(0) == length and stored(x) is x
    x, g = (x, g) if by_sample else (x.contiguous(), g.contiguous())
    parts = -(-length // _LARGE_BLOCK)
    sums = torch.empty((len(x), parts, len(widths)), dtype=torch.float32, device=x.device)
    packed = sum(width << (6 * place) for place, width in enumerate(widths))
    kinds = packed, len(widths), within.measured_here, squared, _LARGE_BLOCK
    with on_device(x):
        gains[len(x), parts](x, g, within.lo, within.span, sums, length, parts, *kinds, **EXACT)
    return sums[:, 0] if parts == 1 else sums.sum(1)


def _programs(count: int) -> int:
    return -(-count // _BLOCK)
