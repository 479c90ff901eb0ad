"""How a block format rounds the two operands of each product of a training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from fractrain_fx.config.kinds import check_kinds, made
from fractrain_fx.config.precision import Precision
from fractrain_fx.errors import ConfigError

__all__ = ["BLOCK_FORMATS", "PRODUCTS", "BlockFormatName", "OperandRecipe", "ProductName", "ProductRecipe", "Recipe"]

BlockFormatName = Literal["mx", "nvfp4", "fp8", "int"]
BLOCK_FORMATS: tuple[str, ...] = get_args(BlockFormatName)

ProductName = Literal["forward", "input_gradient", "weight_gradient"]
PRODUCTS: tuple[ProductName, ...] = get_args(ProductName)
"""The three products of an op, in the order of a training step."""


@dataclass(frozen=True)
class OperandRecipe:
    """How one operand of a product is rounded.

    Attributes:
        stochastic: round up or down by chance, so that the expected value is the value itself. Values beyond the last
            level saturate: ``mx`` and ``nvfp4`` have some, because their scales are rounded.
        eight: the element at 8 bits (``mx`` and ``fp8``).
        square: blocks are as long along the axis that the tensor's other product sums over, so that both products
            round the tensor alike (weights under ``mx`` and ``nvfp4``, everything under ``int`` and ``fp8``).
        per_row: one scale for each row along the summed axis, not one for the tensor (``fp8`` and ``int``).
        block: length along the summed axis of blocks with a float32 scale each (``fp8``, ``int`` and ``nvfp4``).
            ``None``: 32 for square blocks of ``int``, otherwise the whole tensor.
        four_over_six: the largest value of a block becomes 4 or 6, whichever rounds the block better (``nvfp4``; arXiv
            2512.02010).
        again: round what the forward product multiplied, not the tensor itself, so that forward and backward see the
            same numbers (second operands of both gradients; arXiv 2510.27527).
        eden: round to nearest, and correct the scales of all blocks that a Hadamard transform mixed by one factor, so
            that the expected value stays; the corrected scales are rounded by chance (``nvfp4``, gradients with
            ``hadamard``; MS-EDEN, arXiv 2601.22813).

    Raises:
        ConfigError: ``eight`` or ``block`` is unknown, or settings do not go together.
    """

    stochastic: bool = False
    eight: Literal["e4m3", "e5m2"] = "e4m3"
    square: bool = False
    per_row: bool = False
    block: Literal[16, 32, 64, 128] | None = None
    four_over_six: bool = False
    again: bool = False
    eden: bool = False

    def __post_init__(self) -> None:
        check_kinds(self)
        if self.per_row and (self.square or self.block):
            name = "square" if self.square else "block"
            raise ConfigError(f"{name} and per_row name two kinds of blocks for one operand: leave one of them out")
        if self.four_over_six and self.stochastic:
            raise ConfigError("four_over_six chooses by the error of rounding to nearest: leave stochastic out")
        if self.eden and (self.stochastic or self.four_over_six or self.square or self.block):
            raise ConfigError("eden scales blocks its own way: leave stochastic, four_over_six, square and block out")

    @property
    def scales_apart(self) -> bool:
        """Whether blocks get scales that no other library's files hold, and no kernel of this package computes."""
        return self.four_over_six or self.eden


@dataclass(frozen=True)
class ProductRecipe:
    """How both operands of a product are rounded: ``x`` is an activation, ``w`` a weight, ``g`` an output gradient.

    Attributes:
        first: ``x`` of the forward product, ``g`` of both gradients.
        second: ``w`` of the forward product and of the input gradient, ``x`` of the weight gradient.
        hadamard: length, in values along the summed axis, of a Hadamard transform of both operands before they are
            rounded. It spreads outliers and does not change the product. Its signs are random in gradients and all
            positive in the forward product. ``None``: no transform.
        rows: length, in rows of ``g``, of a Hadamard transform of ``g`` before it is rounded, which the product undoes
            (input gradient; arXiv 2501.02625). ``None``: no transform.
        bfloat16: both operands keep 16 bits where the stage has fewer. Costs count them.
        format: the number format of both operands, if not that of the recipe.

    Raises:
        ConfigError: ``hadamard`` or ``rows`` is not a power of two from 2 to 128, or ``bfloat16`` has other settings
            beside it.
    """

    first: OperandRecipe = OperandRecipe()
    second: OperandRecipe = OperandRecipe()
    hadamard: int | None = None
    bfloat16: bool = False
    format: BlockFormatName | None = None
    rows: int | None = None

    def __post_init__(self) -> None:
        for name in ("first", "second"):
            if isinstance(value := getattr(self, name), Mapping):
                object.__setattr__(self, name, made(OperandRecipe, value))
        check_kinds(self)
        for name in ("hadamard", "rows"):
            length = getattr(self, name)
            if length is not None and length not in (2, 4, 8, 16, 32, 64, 128):
                raise ConfigError(f"{name}={length} must be a power of two, 2 to 128, or None for no transform")
        if self.bfloat16 and replace(self, bfloat16=False) != ProductRecipe():
            raise ConfigError(
                "bfloat16 leaves nothing to round in blocks: leave out first, second, hadamard, rows and format"
            )


@dataclass(frozen=True)
class Recipe:
    """How a block format rounds the six operands of an op's three products. The stage's bits select the elements.

    Attributes:
        format: ``mx``, ``nvfp4``, ``fp8`` or ``int``; a product may have another one (``ProductRecipe.format``).
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
        for name in PRODUCTS:
            if isinstance(value := getattr(self, name), Mapping):
                object.__setattr__(self, name, made(ProductRecipe, value))
        check_kinds(self)
        if self.forward.rows is not None or self.weight_gradient.rows is not None:
            raise ConfigError("rows goes with input_gradient, whose result has the rows of g")
        if self.forward.hadamard is not None and any(product.second.again for product in self.products):
            raise ConfigError(
                "again rounds what the forward product multiplied, which its hadamard mixes: leave one out"
            )
        for name, product, format in zip(PRODUCTS, self.products, self.formats, strict=True):
            _check_operands(name, product, format)

    @property
    def products(self) -> tuple[ProductRecipe, ProductRecipe, ProductRecipe]:
        """The three products, in the order of a training step."""
        return self.forward, self.input_gradient, self.weight_gradient

    @property
    def formats(self) -> tuple[str, str, str]:
        """The number format of each product."""
        forward, input_gradient, weight_gradient = (product.format or self.format for product in self.products)
        return forward, input_gradient, weight_gradient

    def bits_of(self, product: ProductName, precision: Precision, weight_bits: int | None = None) -> tuple[int, int]:
        """The bits of both operands of a product; ``weight_bits`` are those of a weight with bits of its own."""
        operands = precision.operands(weight_bits, self.least, by_product=self.by_product)
        return operands[PRODUCTS.index(product)]

    @property
    def transforms(self) -> bool:
        """Whether it mixes values before it rounds them."""
        return any(product.hadamard is not None or product.rows is not None for product in self.products)

    @property
    def least(self) -> tuple[int, int, int]:
        """Fewest bits of the operands of each product; 0 where the stage alone decides."""
        forward, input_gradient, weight_gradient = (16 if product.bfloat16 else 0 for product in self.products)
        return forward, input_gradient, weight_gradient


def _check_operands(name: ProductName, product: ProductRecipe, format: str) -> None:
    """Raise a ``ConfigError`` for settings of a product's operands that change nothing in a format."""
    operands, own_blocks = (product.first, product.second), format in ("mx", "nvfp4")
    weightless = operands if name == "weight_gradient" else operands[:1]
    if own_blocks and any(operand.square for operand in weightless):
        raise ConfigError("square goes with weights: the second operands of forward and input_gradient")
    if product.first.again or (name == "forward" and product.second.again):
        raise ConfigError("again goes with the second operands of both gradients: w of one and x of the other")
    for operand in operands:
        if format == "fp8" and operand.square and operand.block is None:
            raise ConfigError("square changes nothing under format 'fp8' without blocks: write their length as block")
        if format == "nvfp4" and operand.square and operand.block:
            raise ConfigError("square and block do not go together under format 'nvfp4': leave one of them out")
        if own_blocks and (operand.per_row or (operand.block and format == "mx")):
            word = "per_row" if operand.per_row else "block"
            raise ConfigError(f"{word} changes nothing under format {format!r}, which has blocks of its own")
        if format != "nvfp4" and operand.scales_apart:
            word = "eden" if operand.eden else "four_over_six"
            raise ConfigError(f"{word} goes with format 'nvfp4'")
        if operand.eden and (name == "forward" or product.hadamard is None):
            raise ConfigError("eden goes with gradients that have a Hadamard transform: write hadamard=128")
        if format in ("nvfp4", "int") and operand.eight != "e4m3":
            raise ConfigError(f"eight changes nothing under format {format!r}, which has no such element")
