"""The C++ kernels of the block formats as ops that ``torch.compile`` calls and does not look into.

A graph holds no number of bits and no seed: they are data, which an op reads when it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fractrain_fx.config.precision import FLOAT_BITS
from fractrain_fx.errors import InputError
from fractrain_fx.formats.microscaling.blocks import Cut
from fractrain_fx.formats.microscaling.elements import HALF_BITS, Grid, to_bfloat16
from fractrain_fx.formats.microscaling.scales import Scale
from fractrain_fx.formats.noise import draw_seed
from fractrain_fx.kernels.microscaling import (
    has_kernels,
    room,
    rotate_compiled,
    rotated_room,
    round_blocks_compiled,
)

__all__ = ["has_ops", "rotate_in_graph", "round_in_graph"]

# Ops of the layout in which the compiler's own code leaves values, so that it turns none round: it computes
# convolutions with channels innermost.
_TAGS = (torch.Tag.flexible_layout,)


def has_ops(x: Tensor, bits: Tensor) -> bool:
    """Whether the ops take the values, in a compiled graph: at most 32 bits wide, on a CPU, with one width for all."""
    return torch.compiler.is_compiling() and has_kernels(x) and bits.is_cpu and bits.numel() == 1


def round_in_graph(
    x: Tensor,
    bits: Tensor,
    elements: Mapping[int, Grid],
    cuts: Sequence[Cut],
    scale: Scale,
    *,
    stochastic: bool,
    seed: Tensor | None,
    matrices: bool,
) -> Tensor:
    """Round like :func:`~fractrain_fx.kernels.microscaling.round_blocks_compiled`, or as 0, 16 or 32 bits say.

    ``x`` must satisfy :func:`has_ops`. A width without an element is refused when the graph runs.
    """
    numbers = [float(number) for grid in elements.values() for number in grid]
    first, second = cuts[0].dims, cuts[1].dims if len(cuts) > 1 else ()
    noise = (draw_seed() if seed is None else seed) if stochastic else None
    rounded: Tensor = _round(x, bits, [*elements], numbers, first, second, cuts[0].size, scale, noise, matrices)
    return rounded


def rotate_in_graph(x: Tensor, bits: Sequence[Tensor], dim: int, width: int, seed: Tensor) -> Tensor:
    """:func:`~fractrain_fx.formats.microscaling.hadamard.rotate`, where one of a product's operands has few bits.

    ``bits`` are those of both operands; ``x`` is one of them and must satisfy :func:`has_ops`.
    """
    rotated: Tensor = _rotate(x, bits, dim, width, seed)
    return rotated


@torch.library.custom_op("fractrain_fx::round_operand", mutates_args=(), tags=_TAGS)
def _round(
    x: Tensor,
    bits: Tensor,
    widths: Sequence[int],
    numbers: Sequence[float],
    first: Sequence[int],
    second: Sequence[int],
    size: int | None,
    scale: str,
    seed: Tensor | None,
    matrices: bool,
) -> Tensor:
    width = int(bits)
    if width in (0, HALF_BITS, FLOAT_BITS):
        values = to_bfloat16(x) if width == HALF_BITS else x
        return room(x, matrices).to(x.dtype).copy_(values)
    if width not in widths:
        raise InputError(f"bits={width} is not a width of this format: it has {[*widths, HALF_BITS, FLOAT_BITS]}")
    place = len(Grid._fields) * widths.index(width)
    relative, smallest, largest, top = numbers[place : place + len(Grid._fields)]
    grid = Grid(relative, smallest, largest, int(top))
    cuts = [Cut(tuple(dims), size) for dims in ((first, second) if second else (first,))]
    noisy = seed is not None
    return round_blocks_compiled(x, grid, cuts, scale, stochastic=noisy, seed=seed, matrices=matrices)  # type: ignore[arg-type]


@_round.register_fake
def _(
    x: Tensor,
    bits: Tensor,
    widths: Sequence[int],
    numbers: Sequence[float],
    first: Sequence[int],
    second: Sequence[int],
    size: int | None,
    scale: str,
    seed: Tensor | None,
    matrices: bool,
) -> Tensor:
    return room(x, matrices).to(x.dtype)


@torch.library.custom_op("fractrain_fx::rotate_operand", mutates_args=(), tags=_TAGS)
def _rotate(x: Tensor, bits: Sequence[Tensor], dim: int, width: int, seed: Tensor) -> Tensor:
    if any(int(number) not in (0, HALF_BITS, FLOAT_BITS) for number in bits):
        return rotate_compiled(x, dim, width, seed)
    out = rotated_room(x, dim, width)
    length = x.shape[dim]
    out.narrow(dim, 0, length).copy_(x)
    out.narrow(dim, length, out.shape[dim] - length).zero_()
    return out


@_rotate.register_fake
def _(x: Tensor, bits: Sequence[Tensor], dim: int, width: int, seed: Tensor) -> Tensor:
    return rotated_room(x, dim, width)
