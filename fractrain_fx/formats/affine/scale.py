"""The distance between neighbouring levels of the affine grid, ``max(span / (2^bits - 1), 1e-8)``.

Whoever changes it changes ``scale_of`` in native/csrc/grid.h and ``_scale`` in kernels/triton/kernels.py too, which
compute it inside their loops.
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from fractrain_fx.formats.bits import highest_level

__all__ = ["SMALLEST_SCALE", "scale_number", "scales"]

SMALLEST_SCALE = 1e-8
"""Levels lie at least this far apart, so that a constant tensor has a grid too."""


def scales(span: Float[Tensor, "*ranges"], bits: int | Int[Tensor, "*bits"]) -> Float[Tensor, "*scales"]:
    """The distance for each range and width, which broadcast against one another.

    It divides by a tensor, because a GPU multiplies by the inverse of a Python number: values midway between two levels
    would then go to the other one.
    """
    highest = span.new_full((), 2.0**bits - 1) if isinstance(bits, int) else highest_level(bits, span.dtype)
    return (span / highest).clamp(min=SMALLEST_SCALE)


def scale_number(span: float, bits: int) -> float:
    """The same for one range and width, as a number; a width of 0, which rounds nothing, has one level.

    Dividing two float32 numbers in float64 and rounding to float32 gives the quotient of a division in float32.
    """
    return max(span / (2.0**bits - 1 if bits else 1.0), SMALLEST_SCALE)
