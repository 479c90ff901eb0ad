"""Launches the kernels on tensors. The numbers are those of the plain operations, up to the order of sums."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fractrain_fx.formats.base import ValueRange
from fractrain_fx.formats.running import RangeBuffers
from fractrain_fx.kernels.triton.fit import on_device, place, stored

__all__ = [
    "EXACT",
    "LONG",
    "gains_by_triton",
    "measure_by_triton",
    "round_by_triton",
    "round_rows_by_triton",
]

# Values of one program.
_BLOCK = 1024
# Of the gate's gradient, which takes several widths of each value, and writes a number for each block.
_LARGE_BLOCK = 4096
# Most programs that measure a tensor, and values of a row that one program measures and rounds.
_PARTS, _ROW = 1024, 1 << 16
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

    The noise, if its seed ``noise`` is given, is the hash of compiled graphs, of each value's position in memory.

    ``bits`` and the ends of the range broadcast against ``x``. With ``erase`` values of 0 bits become 0 instead of
    staying as they are. The result has the type of ``x``; it is ``None`` if bits or ranges differ along several
    dimensions.
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


def round_rows_by_triton(w: Tensor, bits: Tensor, dim: int | None) -> tuple[Tensor, ValueRange] | None:
    """Measure and round a weight to one width, in one launch.

    Gives the rounded values and one range for each index of ``dim``, shaped to broadcast; ``None`` if the rows along
    ``dim`` are long or do not lie one after the other.
    """
    from fractrain_fx.kernels.triton.kernels import rounded_rows

    length = w.numel() // len(w) if w.ndim else 1
    if not _has_rows(w, dim) or bits.numel() > 1 or length > _ROW:
        return None
    out = torch.empty_like(w)
    lo = torch.empty((len(w), *[1] * (w.ndim - 1)), dtype=torch.float32, device=w.device)
    span = torch.empty_like(lo)
    with on_device(w):
        rounded_rows[len(w),](w, out, bits, lo, span, length, _BLOCK, **EXACT)
    return out, ValueRange(lo, span, True)


def _has_rows(x: Tensor, dim: int | None) -> bool:
    """Whether the indices of ``dim`` are rows of contiguous memory."""
    return dim is not None and dim % x.ndim == 0 and x.is_contiguous()


def measure_by_triton(
    x: Tensor, dim: int | None, shape: Sequence[int], running: RangeBuffers | None = None, weight: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Low end and width of the range of ``x``, as :func:`~fractrain_fx.formats.affine.measure` finds them.

    There is one range for each index of ``dim``; both results have ``shape``. Without ``dim``, a ``running`` range may
    move, in place, to that of ``x``, which has ``weight`` in it (:func:`~fractrain_fx.formats.running.move_range`).
    """
    from fractrain_fx.kernels.triton.kernels import ends, measured, rows

    lo = torch.empty(shape, dtype=torch.float32, device=x.device)
    span = torch.empty_like(lo)
    with on_device(x):
        if dim is None:
            x, count = stored(x), x.numel()
            stretch = -(-_programs(count) // _PARTS) * _BLOCK
            moves = running is not None, _PARTS
            to = running or (lo, span, lo)
            measured[-(-count // stretch),](
                x, *_shared(x), lo, span, *to, weight, count, stretch, *moves, _BLOCK, **EXACT
            )
        elif _has_rows(x, dim):
            rows[lo.numel(),](x, lo, span, x.numel() // len(x), _BLOCK, **EXACT)
        else:
            others = [axis for axis in range(x.ndim) if axis != dim % x.ndim]
            lowest, highest = (x.amin(others), x.amax(others)) if others else (x.contiguous(),) * 2
            ends[_programs(lo.numel()),](lowest, highest, lo, span, lo.numel(), _BLOCK, **EXACT)
    if running is not None:
        torch.autograd.graph.increment_version(running)
    return lo, span


def _shared(x: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for the extremes of programs that measure, and for the number of those that are done, which is 0.

    Launches on a stream come one after the other, so they share it. Those of a CUDA graph run when the graph does.
    """
    if not x.is_cuda:
        return _memory(x.device, 0)
    if torch.cuda.is_current_stream_capturing():
        return _memory.__wrapped__(x.device, 0)
    return _memory(x.device, torch.cuda.current_stream(x.device).cuda_stream)


@cache
def _memory(device: torch.device, stream: int) -> tuple[Tensor, Tensor]:
    return torch.empty(2 * _PARTS, device=device), torch.zeros(1, dtype=torch.int32, device=device)


def gains_by_triton(
    x: Tensor, g: Tensor, widths: Sequence[int], within: ValueRange, *, squared: bool = False
) -> Tensor:
    """For each sample and each width, the sum of ``g * (Q(x) - x)``, or of its squares; 0 for 0 and 32 bits.

    Samples are the first dimension of ``x``; ``g`` is the gradient of the rounded values, all in one range.
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
