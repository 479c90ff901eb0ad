"""The numbers that a sweep over an operand and its rounded values counts."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["Counts"]


class Counts(NamedTuple):
    """The effect of rounding in blocks on a tensor, in numbers.

    Attributes:
        numbers: the norms of the values and of their errors, in one unit; the lowest and the highest value; the number
            of values that are not 0, that become 0, and that are clipped; of blocks whose scale is beyond its type, and
            of blocks with a scale.
        scales: how many blocks have a scale of each exponent, from -127 on.
    """

    numbers: Float[Tensor, " 9"]
    scales: Int[Tensor, " 256"]
