"""The settings of format ``affine``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fractrain_fx.config.kinds import check_kinds
from fractrain_fx.errors import ConfigError

__all__ = ["AffineConfig", "GradientBits", "GradientGrid", "Ranges"]

GradientBits = Literal["given", "needed"]
GradientGrid = Literal["range", "zero"]
Ranges = Literal["tensor", "sample", "head", "row"]


@dataclass(frozen=True)
class AffineConfig:
    """How format ``affine`` finds the levels of its numbers.

    Attributes:
        gradient_grid: the levels of rounded output gradients. ``range``: from the lowest value on. ``zero``: shifted by
            less than a level, so that one level is 0 and zero gradients stay zero.
        gradient_bits: the bits of each sample's output gradient. ``given``: the backward bits. ``needed``: those that
            number the levels between its lowest and its highest value. The values stay the same, and the cost falls,
            because most samples have much smaller gradients than those that set the range of the batch.
        ranges: what shares a range. ``tensor``: an activation or gradient, and each output channel of a weight.
            ``sample``: as ``tensor``, but each sample of an activation or gradient has a range of its own.
            ``row``: what a product sums over, so that each product rounds its operands anew. ``head``: as ``tensor``,
            but with one range for each index that no product sums over: sample and head in the products of attention.
            All but ``tensor`` measure in evaluation too.
        keep: share (0..1) of the old running range that a training step keeps.
    """

    gradient_grid: GradientGrid = "range"
    gradient_bits: GradientBits = "given"
    ranges: Ranges = "tensor"
    keep: float = 0.9

    def __post_init__(self) -> None:
        check_kinds(self, "affine.")
        if not 0 <= self.keep <= 1:
            raise ConfigError(f"affine.keep={self.keep} must lie in 0..1")

    @property
    def per_product(self) -> bool:
        """Whether each product rounds its operands anew."""
        return self.ranges in ("row", "head")
