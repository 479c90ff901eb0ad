"""How a block format rounds the two operands of each product of a training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar, get_args

from fractrain_fx.config.kinds import check_kinds
from fractrain_fx.errors import ConfigError

__all__ = ["BLOCK_FORMATS", "BlockFormatName", "OperandRecipe", "ProductRecipe", "Recipe"]

BlockFormatName = Literal["mx", "nvfp4", "fp8", "int"]
BLOCK_FORMATS: tuple[str, ...] = get_args(BlockFormatName)


_R = TypeVar("_R", "OperandRecipe", "ProductRecipe")


@dataclass(frozen=True)
class OperandRecipe:
    """How one operand of a product is rounded.

    Attributes:
        stochastic: round up or down by chance, so that the expected value is the value itself.
        eight: the element at 8 bits (``mx`` and ``fp8``).
        square: blocks are as long along the axis that the tensor's other product sums over, so that both products
            round the tensor alike (weights under ``mx`` and ``nvfp4``, everything under ``int`` and ``fp8``).
        per_row: one scale for each row along the summed axis, not one for the tensor (``fp8`` and ``int``).
        block: length along the summed axis of blocks with a scale each (``fp8`` and ``int``). ``None``: 32 for square
            blocks of ``int``, otherwise no blocks.
        four_over_six: the largest value of a block becomes 4 or 6, whichever rounds the block better (``nvfp4``; arXiv
            2512.02010).

    Raises:
        ConfigError: ``eight`` or ``block`` is unknown, or settings do not go together.
    """

    stochastic: bool = False
    eight: Literal["e4m3", "e5m2"] = "e4m3"
    square: bool = False
    per_row: bool = False
    block: Literal[16, 32, 64, 128] | None = None
    four_over_six: bool = False

    def __post_init__(self) -> None:
        check_kinds(self)
        if self.per_row and (self.square or self.block):
            name = "square" if self.square else "block"
            raise ConfigError(f"{name} and per_row name two kinds of blocks for one operand: leave one of them out")
        if self.four_over_six and self.stochastic:
            raise ConfigError("four_over_six chooses by the error of rounding to nearest: leave stochastic out")


@dataclass(frozen=True)
class ProductRecipe:
    """How both operands of a product are rounded: ``x`` is an activation, ``w`` a weight, ``g`` an output gradient.

    Attributes:
        first: ``x`` of the forward product, ``g`` of both gradients.
        second: ``w`` of the forward product and of the input gradient, ``x`` of the weight gradient.
        hadamard: length, in values along the summed axis, of a random Hadamard transform of both operands before they
            are rounded. It spreads outliers and does not change the product. ``None``: no transform.
        bfloat16: both operands keep 16 bits where the stage has fewer. Costs count them.

    Raises:
        ConfigError: ``hadamard`` is not a power of two from 2 to 128, or ``bfloat16`` has other settings beside it.
    """

    first: OperandRecipe = OperandRecipe()
    second: OperandRecipe = OperandRecipe()
    hadamard: int | None = None
    bfloat16: bool = False

    def __post_init__(self) -> None:
        for name in ("first", "second"):
            if isinstance(value := getattr(self, name), Mapping):
                object.__setattr__(self, name, _made(OperandRecipe, name, value))
        check_kinds(self)
        if self.hadamard is not None and self.hadamard not in (2, 4, 8, 16, 32, 64, 128):
            raise ConfigError(f"hadamard={self.hadamard} must be a power of two, 2 to 128, or None for no transform")
        if self.bfloat16 and (self.first, self.second, self.hadamard) != (OperandRecipe(), OperandRecipe(), None):
            raise ConfigError("bfloat16 leaves nothing to round in blocks: leave out first, second and hadamard")


@dataclass(frozen=True)
class Recipe:
    """How a block format rounds the six operands of an op's three products. The stage's bits select the elements.

    Attributes:
        format: ``mx``, ``nvfp4``, ``fp8`` or ``int``.
        forward: ``x`` and ``w``, summed over input features.
        input_gradient: ``g`` and ``w``, summed over output features.
        weight_gradient: ``g`` and ``x``, summed over positions and samples.
        by_product: both operands of the forward product have the forward bits, and both of each gradient product the
            backward bits, so that a stage may raise the forward product only, or the backward products only. Without
            it ``x`` and ``w`` have the forward bits in all three products, and ``g`` has the backward bits.

    Raises:
        ConfigError: the format is unknown, or a setting changes nothing under it or in that product.
    """

    format: BlockFormatName
    forward: ProductRecipe = ProductRecipe()
    input_gradient: ProductRecipe = ProductRecipe()
    weight_gradient: ProductRecipe = ProductRecipe()
    by_product: bool = False

    def __post_init__(self) -> None:
        if self.format not in BLOCK_FORMATS:
            raise ConfigError(f"a recipe of format {self.format!r} is unknown: write one of {', '.join(BLOCK_FORMATS)}")
        for name in ("forward", "input_gradient", "weight_gradient"):
            if isinstance(value := getattr(self, name), Mapping):
                object.__setattr__(self, name, _made(ProductRecipe, name, value))
        check_kinds(self)
        operands = [each for product in self.products for each in (product.first, product.second)]
        if self.forward.hadamard is not None or self.input_gradient.hadamard is not None:
            raise ConfigError("hadamard goes with weight_gradient: the two other products are not transformed")
        others = (self.forward.first, self.input_gradient.first, *operands[4:])
        own_blocks = self.format in ("mx", "nvfp4")
        if own_blocks and any(each.square for each in others):
            raise ConfigError("square goes with weights: the second operands of forward and input_gradient")
        if self.format == "fp8" and any(each.square and each.block is None for each in operands):
            raise ConfigError("square changes nothing under format 'fp8' without blocks: write their length as block")
        if own_blocks and any(each.per_row or each.block for each in operands):
            name = "per_row" if any(each.per_row for each in operands) else "block"
            raise ConfigError(f"{name} changes nothing under format {self.format!r}, which has blocks of its own")
        if self.format != "nvfp4" and any(each.four_over_six for each in operands):
            raise ConfigError("four_over_six goes with format 'nvfp4'")
        if self.format in ("nvfp4", "int") and any(each.eight != "e4m3" for each in operands):
            raise ConfigError(f"eight changes nothing under format {self.format!r}, which has no such element")

    @property
    def products(self) -> tuple[ProductRecipe, ProductRecipe, ProductRecipe]:
        """The three products, in the order of a training step."""
        return self.forward, self.input_gradient, self.weight_gradient

    @property
    def transforms(self) -> bool:
        """Whether it mixes the samples of a batch before it rounds them."""
        return self.weight_gradient.hadamard is not None

    @property
    def least(self) -> tuple[int, int, int]:
        """Fewest bits of the operands of each product; 0 where the stage alone decides."""
        forward, input_gradient, weight_gradient = (16 if product.bfloat16 else 0 for product in self.products)
        return forward, input_gradient, weight_gradient


def _made(kind: type[_R], place: str, value: Mapping[str, Any]) -> _R:
    """A part of a recipe from the mapping that a saved configuration holds."""
    known = [each.name for each in fields(kind)]
    if unknown := [key for key in value if key not in known]:
        raise ConfigError(f"{place} of a recipe has no field {unknown[0]!r}; it has {', '.join(known)}")
    return kind(**value)
