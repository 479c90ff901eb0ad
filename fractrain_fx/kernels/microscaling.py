"""The block formats by C++ kernels on a CPU (``backend="cpu"``): each rounding or transform in one pass.

As operations of torch, a rounding takes about eleven passes over memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fractrain_fx.formats.bits import work_dtype
from fractrain_fx.formats.counts import Counts
from fractrain_fx.formats.microscaling.blocks import Cut
from fractrain_fx.formats.microscaling.elements import Grid
from fractrain_fx.formats.microscaling.hadamard import rotate, rotation
from fractrain_fx.formats.microscaling.scales import Scale
from fractrain_fx.formats.noise import draw_seed
from fractrain_fx.native import kernels

__all__ = [
    "count_blocks_compiled",
    "has_kernels",
    "room",
    "rotate_compiled",
    "rotated_room",
    "round_blocks_compiled",
]

# `Scale` in csrc/elements.h. The last one is that of a float32 scale for the whole tensor.
_KINDS = {"e8m0": 0, "e4m3": 1, "float32": 2}
_OF_TENSOR = 3


def has_kernels(x: Tensor) -> bool:
    """Whether the kernels take the values: of at most 32 bits, on a CPU, not empty."""
    return x.is_cpu and work_dtype(x) == torch.float32 and x.numel() > 0


def round_blocks_compiled(
    x: Tensor,
    grid: Grid,
    cuts: Sequence[Cut],
    scale: Scale,
    *,
    stochastic: bool = False,
    seed: Tensor | None = None,
    matrices: bool = False,
) -> Tensor:
    """Round values that satisfy :func:`has_kernels` like :func:`~fractrain_fx.formats.microscaling.round_blocks`.

    The result is the same bit for bit. Only the noise differs: it is a hash of a value's place in the result's memory.
    A ``seed`` that is left out is drawn from torch's default generator. There are one or two ``cuts``, two of equal
    size for square blocks. ``matrices`` stores the result as matrices of the last two dimensions one after the other,
    as products read them; otherwise it is in the order of ``x`` in memory.
    """
    first, second, size, kind = _shared(x, cuts, scale)
    number = int(draw_seed() if seed is None else seed) if stochastic else None
    single, out = _single(x), room(x, matrices)
    kernels().round_blocks(single, first, second, size, grid, kind, number, out=out)
    return out if single is x else out.to(x.dtype)


def count_blocks_compiled(x: Tensor, rounded: Tensor, grid: Grid, cuts: Sequence[Cut], scale: Scale) -> Counts:
    """Count what :func:`round_blocks_compiled` has done, in one sweep over values and rounded values."""
    first, second, size, kind = _shared(x, cuts, scale)
    return Counts(*kernels().count_blocks(_single(x), _single(rounded), first, second, size, grid, kind))


def _shared(x: Tensor, cuts: Sequence[Cut], scale: Scale) -> tuple[tuple[int, ...], tuple[int, ...], int | None, int]:
    """The dimensions of both cuts, the size of their pieces, and the kind of scale, as the kernels take them."""
    first, second = cuts[0].dims, cuts[1].dims if len(cuts) > 1 else ()
    if cuts[0].size is None and scale == "float32" and len(first) == x.ndim:
        return (), (), 1, _OF_TENSOR
    return first, second, cuts[0].size, _KINDS[scale]


def rotate_compiled(x: Tensor, dim: int, width: int, seed: Tensor) -> Tensor:
    """:func:`~fractrain_fx.formats.microscaling.hadamard.rotate` by :func:`rotation`, up to the order of sums.

    ``x`` must satisfy :func:`has_kernels`. The kernel needs values next to each other along a dimension other than
    ``dim``; others take the product of matrices.
    """
    x = _single(x)
    if x.stride(dim) == 1:
        return rotate(x, dim, rotation(width, seed, x))
    out = rotated_room(x, dim, width)
    kernels().rotate(x, dim, width, int(seed), out=out)
    return out


def room(x: Tensor, matrices: bool) -> Tensor:
    """Memory for what :func:`round_blocks_compiled` computes from ``x``, in float32."""
    return _room(_single(x), x.shape, matrices)


def rotated_room(x: Tensor, dim: int, width: int) -> Tensor:
    """Memory for what :func:`rotate_compiled` gives."""
    x = _single(x)
    shape = tuple(size + -size % width if place == dim else size for place, size in enumerate(x.shape))
    return x.new_empty(shape) if x.stride(dim) == 1 else _room(x, shape, False)


def _room(x: Tensor, shape: Sequence[int], matrices: bool) -> Tensor:
    """Memory for a result of ``x``."""
    if shape == x.shape and (not matrices or x.is_contiguous()):
        return torch.empty_like(x)
    if x.ndim < 2 or x.stride(-1) <= x.stride(-2):
        return x.new_empty(shape)
    return x.new_empty([*shape[:-2], shape[-1], shape[-2]]).mT


def _single(x: Tensor) -> Tensor:
    """Half types in float32."""
    return x if x.dtype == torch.float32 else x.float()
