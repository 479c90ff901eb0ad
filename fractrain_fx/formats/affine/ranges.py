"""The affine format with finer ranges than a tensor's, whose scales factor out of every sum."""

from __future__ import annotations

from jaxtyping import Int
from torch import Tensor

from fractrain_fx.config.affine import AffineConfig
from fractrain_fx.formats.affine.format import measure, range_between
from fractrain_fx.formats.affine.rounding import reach_affine, round_affine, shifted_to_zero
from fractrain_fx.formats.affine.scale import levels_of
from fractrain_fx.formats.base import Bits, Operand, Reach, Seed, ValueRange, Values
from fractrain_fx.formats.bits import as_bits, is_rounded, work_dtype
from fractrain_fx.formats.noise import APART
from fractrain_fx.formats.per_product import PerProductFormat

__all__ = ["RangedAffineFormat"]


class RangedAffineFormat(PerProductFormat):
    """Affine rounding in the range of what a product sums over, or of what both products that read a tensor sum over.

    A sum over values ``lo + scale * q`` is ``lo`` and ``scale`` times sums that need no range, if these are constant
    along it: the products of codes stay products of whole numbers.

    Args:
        affine: with ``ranges`` of a ``row`` or ``head``; ``gradient_grid`` is that of
            :class:`~fractrain_fx.formats.affine.AffineFormat`.
    """

    name = "affine"

    def __init__(self, affine: AffineConfig) -> None:
        self.ranges = affine.ranges
        self.gradient_grid = affine.gradient_grid

    def operand(self, x: Values, bits: Bits, of: Operand, *, seed: Seed = None) -> Values:
        """Round an operand of a product; gradients stochastically."""
        if not x.numel():
            return x
        bits, within = as_bits(bits, x), self.range_of(x, of)
        if of.tensor != "g":
            return round_affine(x, bits, within)
        # Rows are rounded for each product; what has one range for both is rounded once.
        if seed is not None and of.product == "weight_gradient" and self.ranges == "row":
            seed = seed + APART
        if self.gradient_grid == "range":
            return round_affine(x, bits, within, stochastic=True, seed=seed)
        shifted = shifted_to_zero(bits, within)
        return round_affine(x, bits, shifted, stochastic=True, seed=seed) * (x != 0)

    def reach(self, x: Values, bits: Int[Tensor, "*bits"], of: Operand, within: ValueRange | None) -> Reach:
        measured = self.range_of(x, of)
        if of.tensor == "g" and self.gradient_grid == "zero":
            measured = shifted_to_zero(bits, measured)
        scale = levels_of(measured, bits).scale * (is_rounded(bits) & (measured.span > 0))
        return reach_affine(bits, measured)._replace(scales=scale)

    def range_of(self, x: Values, of: Operand) -> ValueRange:
        """The ranges of an operand, which broadcast against it."""
        if self.ranges == "head" and of.weight:
            return measure(x.detach(), of.channel)
        shared = of.summed if self.ranges == "row" else tuple(sorted({*of.summed, *of.across}))
        values = x.detach().to(work_dtype(x))
        return range_between(values.amin(shared, keepdim=True), values.amax(shared, keepdim=True))

    def products(self) -> dict[str, str]:
        """For each product, how its operands are rounded, in words."""
        names = {"forward": "xw", "input gradient": "gw", "weight gradient": "gx"}
        words = {name: "a range a row" if self.ranges == "row" else "a range a sample and head" for name in "xwg"}
        words |= {"w": "a range a channel"} if self.ranges == "head" else {}
        return {
            product: ", ".join(f"{name} affine ({words[name]})" for name in both) for product, both in names.items()
        }
