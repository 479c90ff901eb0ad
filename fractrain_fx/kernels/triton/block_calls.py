"""Launches the kernel of the block formats on tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fractrain_fx.formats.bits import dense
from fractrain_fx.formats.microscaling.blocks import Cut
from fractrain_fx.formats.microscaling.elements import Grid
from fractrain_fx.formats.microscaling.scales import Scale
from fractrain_fx.kernels.triton.calls import EXACT, LONG
from fractrain_fx.kernels.triton.fit import on_device, place

__all__ = ["round_blocks_by_triton"]

_KINDS = {"e8m0": 0, "e4m3": 1, "float32": 2}
# Values of one program, and of a stretch of rows whose scale is measured before.
_VALUES, _STRETCH = 1024, 32


class _Axes(NamedTuple):
    """A tensor's memory as ``[outer, a, middle, b, inner]``, in which blocks lie along ``a`` and ``b``.

    ``order`` is the order of its dimensions in that memory.
    """

    order: tuple[int, ...]
    sizes: tuple[int, int, int, int, int]


def round_blocks_by_triton(
    x: Tensor,
    bits: Tensor,
    elements: Mapping[int, Grid],
    cuts: Sequence[Cut],
    scale: Scale,
    *,
    noise: int | None = None,
) -> Tensor | None:
    """Round like :func:`~fractrain_fx.formats.microscaling.round_blocks`; 0, 16 and 32 bits are no small numbers.

    One launch, and two or three more for scales of rows or of the tensor. The noise, if its seed ``noise`` is given, is
    the hash of compiled graphs, of each value's position in memory.

    ``bits`` is one width, or widths that broadcast against ``x``; there are up to three ``elements``, and two ``cuts``
    of equal size for square blocks. The result has the type of ``x``; it is ``None`` if bits differ along several
    dimensions.
    """
    from fractrain_fx.kernels.triton.blocks import blocks_rounded

    order, (outer, a, middle, b, inner) = _axes(x, cuts)
    turned = x.detach().permute(order).contiguous()
    spread = bits.to(x.device).reshape([1] * (x.ndim - bits.ndim) + list(bits.shape)).permute(order)
    of_bits = place(spread, turned)
    if of_bits is None:
        return None
    measured = cuts[0].size is None
    first = cuts[0].size or _STRETCH
    second = first if len(cuts) > 1 else 1
    blocks = outer * -(-a // first) * middle * -(-b // second) * inner
    rows = max(_VALUES // (first * second), 1)
    low, high = (0, 0) if noise is None else (noise & 0x7FFFFFFF, (noise >> 31) & 0x7FFFFFFF)
    grids = [(width, *map(float, grid)) for width, grid in elements.items()]
    (w0, *grid0), (w1, *grid1), (_, *grid2) = (*grids, *grids[-1:], *grids[-1:])[:3]
    kinds = _KINDS[scale], measured, noise is not None, bits.numel() == 1, turned.numel() >= LONG
    out = torch.empty_like(turned)
    with on_device(x):
        sizes = turned.abs() if measured or scale == "e4m3" else turned
        most = sizes.view(outer, a, inner).amax(1) if measured else sizes
        of_tensor = sizes.amax() if scale == "e4m3" else sizes
        blocks_rounded[-(-blocks // rows),](
            *(turned, out, bits, most, of_tensor, blocks, a, middle, b, inner, *of_bits, low, high),
            *(w0, *_of_kernel(grid0), w1, *_of_kernel(grid1), *_of_kernel(grid2), *kinds, rows, first, second),
            **EXACT,
        )
    return out.permute(sorted(range(x.ndim), key=order.__getitem__))


def _of_kernel(grid: Sequence[float]) -> tuple[float, float, float, int]:
    relative, smallest, largest, top = grid
    return relative, smallest, largest, int(top)


def _axes(x: Tensor, cuts: Sequence[Cut]) -> _Axes:
    """The memory of ``x`` as it lies, where the dimensions of each cut lie next to each other there."""
    groups, strides = [cut.dims for cut in cuts], x.stride()
    order = sorted(range(x.ndim), key=lambda dim: -strides[dim]) if dense(x) else list(range(x.ndim))
    if not all(_together(order, dims) for dims in groups):
        inside = [dim for dims in groups for dim in dims]
        order = [dim for dim in order if dim not in inside] + inside
    first, second = sorted((*groups, ())[:2], key=lambda dims: order.index(dims[0]) if dims else x.ndim)
    start, end = order.index(first[0]), order.index(first[-1]) + 1
    low, high = (order.index(second[0]), order.index(second[-1]) + 1) if second else (end, end)
    parts = order[:start], order[start:end], order[end:low], order[low:high], order[high:]
    outer, a, middle, b, inner = (math.prod(x.shape[dim] for dim in part) for part in parts)
    return _Axes(tuple(order), (outer, a, middle, b, inner))


def _together(order: Sequence[int], dims: Sequence[int]) -> bool:
    """Whether dimensions lie next to each other in an order, and one after the other."""
    start = order.index(dims[0])
    return list(order[start : start + len(dims)]) == list(dims)
