"""The small numbers that stand in a block, and rounding to them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fractrain_fx.formats.bits import work_dtype

__all__ = ["BFLOAT16", "ELEMENTS", "HALF_BITS", "Element", "Grid", "exponents", "round_to_grid", "to_bfloat16"]


class Grid(NamedTuple):
    """The values of an element, as numbers or as tensors that broadcast against what is rounded.

    Attributes:
        relative: distance of neighbours in units of the power of two below them.
        smallest: the smallest normal number. Neighbours below it are as far apart as just above it.
        largest: the largest number.
        top: exponent of the largest number.
    """

    relative: float | Tensor
    smallest: float | Tensor
    largest: float | Tensor
    top: int | Tensor


@dataclass(frozen=True)
class Element:
    """A number of a few bits: a sign, ``exponent`` bits and ``mantissa`` bits, without infinities.

    Without exponent bits it is an integer, whose smallest number is left out so that both signs reach equally far.

    Attributes:
        name: as the formats' specifications write it.
        exponent: bits of the exponent.
        mantissa: bits of the mantissa.
        largest: the largest number.
        top: its exponent.
    """

    name: str
    exponent: int
    mantissa: int
    largest: float
    top: int

    @property
    def bits(self) -> int:
        """All bits, with the sign."""
        return 1 + self.exponent + self.mantissa

    @property
    def smallest(self) -> float:
        """The smallest normal number; for integers it is beyond the largest, so that all lie equally far apart."""
        if not self.exponent:
            return 2.0**self.mantissa
        return math.ldexp(1.0, 2 - 2 ** (self.exponent - 1))

    @property
    def grid(self) -> Grid:
        """Its values."""
        return Grid(2.0**-self.mantissa, self.smallest, self.largest, self.top)


# Table 1 and section 5.3 of OCP Microscaling Formats 1.0; integers as they lie, without its factor of 2^-6.
ELEMENTS = {
    element.name: element
    for element in (
        Element("e2m1", 2, 1, 6.0, 2),
        Element("e2m3", 2, 3, 7.5, 2),
        Element("e3m2", 3, 2, 28.0, 4),
        Element("e4m3", 4, 3, 448.0, 8),
        Element("e5m2", 5, 2, 57344.0, 15),
        *(Element(f"int{bits}", 0, bits - 1, 2.0 ** (bits - 1) - 1, bits - 2) for bits in (4, 6, 8)),
    )
}

HALF_BITS = 16
"""The width that stands for bfloat16, without scales."""

BFLOAT16 = Grid(2.0**-7, 2.0**-126, 2.0**128 - 2.0**120, 127)
"""The values of torch's ``bfloat16``. Compiled graphs leave out a cast to that type and back."""

# For each type of values: the integers that its bits are, the bits of its mantissa, and its exponents' bias.
_BITS = {torch.float32: (torch.int32, 23, 127), torch.float64: (torch.int64, 52, 1023)}


def exponents(x: Float[Tensor, "*dims"]) -> Tensor:
    """``floor(log2 |x|)`` of float32 or float64 values as integers, too large for those that are subnormal or 0."""
    integers, mantissa, bias = _BITS[x.dtype]
    return ((x.view(integers) >> mantissa) & (2 * bias + 1)) - bias


def round_to_grid(
    x: Float[Tensor, "*dims"], grid: Grid, noise: Float[Tensor, "*dims"] | None = None
) -> Float[Tensor, "*dims"]:
    """The nearest value of a grid, ties to even, in float32 or float64; beyond the largest value that value.

    Args:
        x: float32 or float64 values; NaN stays NaN.
        grid: the values to round to.
        noise: uniform from -0.5 to 0.5: rounds stochastically, so that the expected value is ``x``.
    """
    integers, mantissa, bias = _BITS[x.dtype]
    # The bits of the exponent alone are a power of two: the one at or below |x|.
    step = (x.view(integers) & ((2 * bias + 1) << mantissa)).view(x.dtype)
    step = step.clamp_(min=grid.smallest).mul_(grid.relative)
    steps = x / step
    if noise is not None:
        steps = steps.add_(noise)
    rounded = steps.round_().mul_(step)
    return rounded.clamp_(-grid.largest, grid.largest)  # type: ignore[arg-type]


def to_bfloat16(x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
    """The nearest values of bfloat16, in the type of ``x``; NaN for infinite ones, which saturate."""
    return (round_to_grid(x.to(work_dtype(x)), BFLOAT16) + 0 * x).to(x.dtype)
