"""The block formats by C++ kernels on a CPU (``rounding="compiled"``): each rounding or transform in one pass.

As operations of torch, a rounding takes about eleven passes over memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fractrain_fx.formats.affine.kernels import has_kernels
from fractrain_fx.formats.microscaling.blocks import Cut
from fractrain_fx.formats.microscaling.elements import Grid
from fractrain_fx.formats.microscaling.scales import Scale
from fractrain_fx.formats.noise import draw_seed
from fractrain_fx.native import kernels

__all__ = ["has_kernels", "rotate_compiled", "round_blocks_compiled"]

# `Scale` in csrc/elements.h. The last one is that of a float32 scale for the whole tensor.
_KINDS = {"e8m0": 0, "e4m3": 1, "float32": 2}
_OF_TENSOR = 3


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
    """Round like :func:`~fractrain_fx.formats.microscaling.round_blocks`, bit for bit.

    Only the noise differs: it is a hash of a value's place in the result's memory.

    Args:
        x: values that :func:`has_kernels`.
        grid: of the element, in numbers.
        cuts: one, or two of equal size for square blocks.
        scale: type of the blocks' scale.
        stochastic: add noise before rounding.
        seed: of that noise; without one it is drawn from torch's default generator.
        matrices: store the result as matrices of the last two dimensions one after the other, as products read them;
            otherwise in the order of ``x`` in memory.
    """
    first, second = cuts[0].dims, cuts[1].dims if len(cuts) > 1 else ()
    size, kind = cuts[0].size, _KINDS[scale]
    if size is None and scale == "float32" and len(first) == x.ndim:
        first, size, kind = (), 1, _OF_TENSOR
    number = int(draw_seed() if seed is None else seed) if stochastic else None
    out = _room(x, x.shape, matrices)
    kernels().round_blocks(x, first, second, size, grid, kind, number, out=out)
    return out


def rotate_compiled(x: Tensor, dim: int, width: int, seed: Tensor) -> Tensor | None:
    """Every ``width`` neighbours along a dimension times :func:`~fractrain_fx.formats.microscaling.hadamard.rotation`.

    The same numbers up to the order of sums. ``None`` if the kernel does not take ``x``, which must have values next to
    each other along another dimension.
    """
    if not has_kernels(x) or x.stride(dim) == 1:
        return None
    shape = [*x.shape]
    shape[dim] += -shape[dim] % width
    out = _room(x, shape, False)
    kernels().rotate(x, dim, width, int(seed), out=out)
    return out


def _room(x: Tensor, shape: Sequence[int], matrices: bool) -> Tensor:
    """Memory for a result of ``x``."""
    if shape == x.shape and (not matrices or x.is_contiguous()):
        return torch.empty_like(x)
    if x.ndim < 2 or x.stride(-1) <= x.stride(-2):
        return x.new_empty(shape)
    return x.new_empty([*shape[:-2], shape[-1], shape[-2]]).mT
