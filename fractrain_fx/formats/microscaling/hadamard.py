"""A random Hadamard transform: it spreads outliers over their neighbours, and products along it stay as they are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from fractrain_fx.config.precision import FLOAT_BITS
from fractrain_fx.formats.bits import known_bits
from fractrain_fx.formats.microscaling.elements import HALF_BITS
from fractrain_fx.formats.noise import hashed

__all__ = ["needs_rotation", "rotate", "rotation", "rotation_at"]

_WIDE = (0, HALF_BITS, FLOAT_BITS)


def rotation(width: int, seed: Int[Tensor, ""] | None, like: Tensor) -> Float[Tensor, "width width"]:
    """An orthogonal matrix: Hadamard's (by Sylvester) with the sign of each column drawn from a seed.

    Without a seed all signs are positive, and the matrix is its own inverse.
    """
    matrix = _hadamard(width, like)
    if seed is None:
        return matrix
    signs = torch.where(hashed(width, matrix[0], seed) < 0, -1.0, 1.0).to(like.dtype)
    return matrix * signs


_made: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}


def _hadamard(width: int, like: Tensor) -> Float[Tensor, "width width"]:
    """The matrix without signs. Eager calls share it, because making it takes 20 launches on a GPU."""
    key = width, like.dtype, like.device
    shares = type(like) in (Tensor, nn.Parameter) and not torch.compiler.is_compiling()
    if shares and key in _made:
        return _made[key]
    matrix = torch.ones(1, 1, dtype=like.dtype, device=like.device)
    while matrix.shape[0] < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    matrix = matrix * math.sqrt(1 / width)
    if shares and type(matrix) is Tensor and not matrix.is_inference():  # what a mode of torch made is for that mode
        _made[key] = matrix
    return matrix


def needs_rotation(bits: Sequence[Int[Tensor, "*bits"]]) -> bool:
    """Whether an operand may have few bits. Values of 16 or 32 bits, or that are skipped, stay as they are."""
    return any(known_bits(widths) not in _WIDE for widths in bits)


def rotation_at(
    bits: Sequence[Int[Tensor, "*bits"]], width: int, seed: Int[Tensor, ""] | None, like: Tensor
) -> Float[Tensor, "width width"]:
    """The rotation of two operands, whose bits may be data; the identity if neither of them needs one."""
    matrix = rotation(width, seed, like)
    if all(known_bits(widths) is not None for widths in bits):
        return matrix
    first, second = ((widths == 0) | (widths == HALF_BITS) | (widths == FLOAT_BITS) for widths in bits)
    same = torch.eye(width, dtype=matrix.dtype, device=matrix.device)
    return torch.where(first & second, same, matrix)


def rotate(x: Float[Tensor, "*dims"], dim: int, matrix: Float[Tensor, "width width"]) -> Float[Tensor, "*longer"]:
    """Every ``width`` neighbours along a dimension times the matrix; zeros fill the last of them up."""
    width, after = matrix.shape[0], x.ndim - dim - 1
    if missing := -x.shape[dim] % width:
        x = F.pad(x, (*(0, 0) * after, 0, missing))
    # One product of large matrices for each stretch, where the values lie: far quicker than many small ones.
    stretches = x.reshape(-1, width, math.prod(x.shape[dim + 1 :]))
    return matrix.matmul(stretches).view(x.shape)
