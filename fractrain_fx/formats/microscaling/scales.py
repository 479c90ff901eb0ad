"""The scales that blocks of small floating-point numbers share."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fractrain_fx.formats.microscaling.elements import ELEMENTS, Grid, exponents, round_to_grid

__all__ = ["Scale", "Scales", "saturated", "scales"]

Scale = Literal["e8m0", "e4m3", "float32"]

# The smallest normal float32 number. Scales are no smaller, because their inverse must be finite.
_TINY = 2.0**-126

# An E8M0 scale is 2^-127 to 2^127; above 2^126 its inverse would lose bits, and no finite float32 value needs it.
_LOWEST, _HIGHEST = -127, 126


class Scales(NamedTuple):
    """Factors that broadcast against blocks: ``down`` brings values to the elements' range, ``up`` brings them back."""

    down: Float[Tensor, "*blocks"]
    up: Float[Tensor, "*blocks"]


def scales(
    largest: Float[Tensor, "*blocks"],
    grid: Grid,
    kind: Scale,
    *,
    peak: float = ELEMENTS["e4m3"].largest,
    top: float | Tensor | None = None,
) -> Scales:
    """The scale of each block.

    - ``e8m0``: ``2^(floor(log2 max) - top)`` (OCP Microscaling 1.0, section 6.3).
    - ``e4m3``: ``max / largest`` relative to one float32 scale of the tensor, rounded to an e4m3 number, at least its
      smallest normal one (NVFP4).
    - ``float32``: ``max / largest``.

    Args:
        largest: the largest size of a value in each block, float32 or float64. A block where it is NaN or infinite gets
            the scale NaN, as do all blocks of kind ``e4m3`` beside it.
        grid: values of the element.
        kind: type of the scale.
        peak: the ``e4m3`` number of the block that holds the tensor's largest value.
        top: what the largest value of an ``e4m3`` block becomes; ``None``: the element's largest number.
    """
    # NaN for a NaN or infinite block, which the integers and clamps below would hide.
    poison = largest * 0
    if kind == "e8m0":
        exponent = (exponents(largest) - grid.top).clamp(_LOWEST, _HIGHEST)
        return Scales(_power(-exponent, largest), _power(exponent, largest) + poison)
    if kind == "float32":
        up = _over(largest, grid.largest).clamp(min=_TINY)
        return Scales(1 / up, _capped(up, grid) + poison)
    e4m3 = ELEMENTS["e4m3"]
    of_tensor = _over(largest.amax(), peak * grid.largest).clamp(min=_TINY)
    least = (_TINY / of_tensor).clamp(min=e4m3.smallest)
    relative = _over(largest, grid.largest if top is None else top) / of_tensor
    relative = round_to_grid(relative.clamp(min=least).clamp(max=e4m3.largest), e4m3.grid)
    # In this order, which is that of NVIDIA's kernels and of torchao.
    return Scales(1 / of_tensor / relative, _capped(of_tensor * relative, grid) + poison.amax())


def saturated(largest: Float[Tensor, "*blocks"], grid: Grid, kind: Scale) -> Bool[Tensor, "*blocks"]:
    """Whether the scale that each block needs lies beyond those of its type; a block of zeros needs none.

    Args: as those of :func:`scales`.
    """
    if kind == "e8m0":
        exponent = exponents(largest) - grid.top
        beyond = (exponent < _LOWEST) | (exponent > _HIGHEST)
    elif kind == "float32":
        beyond = _over(largest, grid.largest) < _TINY
    else:
        e4m3 = ELEMENTS["e4m3"]
        of_tensor = _over(largest.amax(), e4m3.largest * grid.largest).clamp(min=_TINY)
        beyond = _over(largest, grid.largest) / of_tensor < e4m3.smallest
    return beyond & (largest > 0)


def _over(x: Tensor, number: float | Tensor) -> Tensor:
    """The quotient as a CPU rounds it: a GPU multiplies by the inverse of a Python number."""
    return x / (number if isinstance(number, Tensor) else x.new_full((), number))


def _power(exponent: Tensor, like: Tensor) -> Tensor:
    """``2^exponent`` exactly, for whole exponents of -127 to 127."""
    bits = torch.where(exponent < -126, 1 << 22, (exponent.int() + 127) << 23).int()
    return bits.view(torch.float32).to(like.dtype)


def _capped(up: Tensor, grid: Grid) -> Tensor:
    """The scales, a little smaller where the element's largest number would become infinite."""
    reach = torch.finfo(up.dtype).max * (1 - 2.0**-24) / grid.largest
    return torch.where((up * grid.largest).isinf(), reach, up)
