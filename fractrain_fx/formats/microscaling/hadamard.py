"""A random Hadamard transform: it spreads outliers over their neighbours, and products along it stay as they are."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from fractrain_fx.formats.noise import hashed

__all__ = ["rotate", "rotation"]


def rotation(width: int, seed: Int[Tensor, ""], like: Tensor) -> Float[Tensor, "width width"]:
    """An orthogonal matrix: Hadamard's (by Sylvester) with the sign of each column drawn from a seed."""
    matrix = torch.ones(1, 1, dtype=like.dtype, device=like.device)
    while matrix.shape[0] < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.where(hashed(width, matrix[0], seed) < 0, -1.0, 1.0).to(like.dtype)
    return matrix * signs * math.sqrt(1 / width)


def rotate(x: Float[Tensor, "*dims"], dim: int, matrix: Float[Tensor, "width width"]) -> Float[Tensor, "*longer"]:
    """Every ``width`` neighbours along a dimension times the matrix; zeros fill the last of them up."""
    width, after = matrix.shape[0], x.ndim - dim - 1
    if missing := -x.shape[dim] % width:
        x = F.pad(x, (*(0, 0) * after, 0, missing))
    # One product of large matrices for each stretch, where the values lie: far quicker than many small ones.
    stretches = x.reshape(-1, width, math.prod(x.shape[dim + 1 :]))
    return matrix.matmul(stretches).view(x.shape)
