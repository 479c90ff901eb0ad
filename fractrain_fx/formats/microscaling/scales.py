"""The scales that blocks of small floating-point numbers share."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fractrain_fx.formats.microscaling.elements import ELEMENTS, Grid, exponents, round_to_grid

__all__ = ["Scale", "Scales", "relative_scales", "saturated", "scales"]

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
    widest: Float[Tensor, "*blocks"] | None = None,
) -> Scales:
    """The scale of each block.

    - ``e8m0``: ``2^(floor(log2 max) - top)`` (OCP Microscaling 1.0, section 6.3).
    - ``e4m3``: :func:`relative_scales` (NVFP4).
    - ``float32``: ``max / largest``.

    Args:
        largest: the largest size of a value in each block, float32 or float64. A block where it is NaN or infinite gets
            the scale NaN, as do all blocks of kind ``e4m3`` beside it.
        grid: values of the element.
        kind: type of the scale.
        peak: of ``e4m3`` scales, as :func:`relative_scales` takes it.
        top: of ``e4m3`` scales, as :func:`relative_scales` takes it.
        widest: of ``e4m3`` scales, as :func:`relative_scales` takes it.
    """
    # NaN for a NaN or infinite block, which the integers and clamps below would hide.
    poison = largest * 0
    if kind == "e8m0":
        exponent = (exponents(largest) - grid.top).clamp(_LOWEST, _HIGHEST)
        return Scales(_power(-exponent, largest), _power(exponent, largest) + poison)
    if kind == "float32":
        up = _over(largest, grid.largest).clamp(min=_TINY)
        return Scales(1 / up, _capped(up, grid) + poison)
    relative, shared = relative_scales(largest, grid, peak=peak, top=top, widest=widest)
    # In this order, which is that of NVIDIA's kernels and of torchao.
    of_all = largest.amax() if widest is None else widest
    return Scales(1 / shared / relative, _capped(shared * relative, grid) + of_all * 0)


def relative_scales(
    largest: Float[Tensor, "*blocks"],
    grid: Grid,
    *,
    peak: float = ELEMENTS["e4m3"].largest,
    top: float | Tensor | None = None,
    widest: Float[Tensor, "*blocks"] | None = None,
) -> tuple[Float[Tensor, "*blocks"], Tensor]:
    """``max / largest`` of each block as an e4m3 number, and the float32 scale that these numbers are relative to.

    No e4m3 number is smaller than the smallest normal one.

    Args:
        largest: the largest size of a value in each block.
        grid: values of the element.
        peak: the e4m3 number of the block that holds the largest value of all.
        top: what the largest value of a block becomes; ``None``: the element's largest number.
        widest: for each block, the largest value of all blocks that share its float32 scale; ``None``: the tensor's.
    """
    e4m3 = ELEMENTS["e4m3"]
    shared = _over(largest.amax() if widest is None else widest, peak * grid.largest).clamp(min=_TINY)
    least = (_TINY / shared).clamp(min=e4m3.smallest)
    relative = _over(largest, grid.largest if top is None else top) / shared
    return round_to_grid(relative.clamp(min=least).clamp(max=e4m3.largest), e4m3.grid), shared


def saturated(
    largest: Float[Tensor, "*blocks"], grid: Grid, kind: Scale, widest: Float[Tensor, "*blocks"] | None = None
) -> Bool[Tensor, "*blocks"]:
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
        shared = _over(largest.amax() if widest is None else widest, e4m3.largest * grid.largest).clamp(min=_TINY)
        beyond = _over(largest, grid.largest) / shared < e4m3.smallest
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
