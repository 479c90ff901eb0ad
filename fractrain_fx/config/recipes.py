"""Recipes of the block formats: how the two operands of each product of a training step are rounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from fractrain_fx.config.kinds import check_kinds
from fractrain_fx.config.precision import FLOAT_BITS, Precision
from fractrain_fx.errors import ConfigError, near

if TYPE_CHECKING:
    from fractrain_fx.config import FracConfig

__all__ = [
    "BLOCK_FORMATS",
    "RECIPES",
    "SCALE_BITS",
    "BlockFormatName",
    "OperandRecipe",
    "ProductRecipe",
    "Recipe",
    "check_recipe",
    "elements_of",
    "recipe_of",
    "widths_of",
]

BlockFormatName = Literal["mx", "nvfp4", "fp8"]
BLOCK_FORMATS: tuple[str, ...] = get_args(BlockFormatName)

SCALE_BITS = {"mx": "8 bits for 32 values", "nvfp4": "8 bits for 16 values", "fp8": "32 bits for a tensor or a row"}
"""The bits of scales, which costs leave out."""

# The element that a width selects in each format.
_ELEMENTS: dict[str, dict[int, str]] = {
    "mx": {4: "e2m1", 6: "e2m3", 8: "e4m3"},
    "nvfp4": {4: "e2m1"},
    "fp8": {8: "e4m3"},
}
# Two widths that are the same in all of them.
_WIDE = {16: "bfloat16", FLOAT_BITS: "float"}


@dataclass(frozen=True)
class OperandRecipe:
    """How one operand of a product is rounded.

    Attributes:
        stochastic: up or down by chance, so that the expected value is the value itself.
        eight: the element at 8 bits.
        square: blocks of a weight span as many rows as columns, so that both products that read the weight round it
            alike (``mx`` and ``nvfp4``).
        per_row: one scale for each row along the summed axis, not one for the tensor (``fp8``).
    """

    stochastic: bool = False
    eight: Literal["e4m3", "e5m2"] = "e4m3"
    square: bool = False
    per_row: bool = False

    def __post_init__(self) -> None:
        check_kinds(self)
        if self.eight not in ("e4m3", "e5m2"):
            raise ConfigError(f"eight={self.eight!r} is not an element of 8 bits: write 'e4m3' or 'e5m2'")


@dataclass(frozen=True)
class ProductRecipe:
    """How both operands of a product are rounded.

    Attributes:
        first: ``x`` of the forward product, ``g`` of both gradients.
        second: ``w`` of the forward product and of the input gradient, ``x`` of the weight gradient.
        hadamard: a random Hadamard transform of so many values along the summed axis, on both operands before they are
            rounded. It spreads outliers and does not change the product. ``None``: no transform.
    """

    first: OperandRecipe = OperandRecipe()
    second: OperandRecipe = OperandRecipe()
    hadamard: int | None = None

    def __post_init__(self) -> None:
        for name in ("first", "second"):
            if isinstance(value := getattr(self, name), Mapping):
                object.__setattr__(self, name, OperandRecipe(**value))
        check_kinds(self)
        if self.hadamard is not None and self.hadamard not in (2, 4, 8, 16, 32, 64, 128):
            raise ConfigError(f"hadamard={self.hadamard} must be a power of two, 2 to 128, or None for no transform")


@dataclass(frozen=True)
class Recipe:
    """How a block format rounds the six operands of an op's three products. The stage's bits select the elements.

    Attributes:
        format: ``mx``, ``nvfp4`` or ``fp8``.
        forward: ``x`` and ``w``, summed over input features.
        input_gradient: ``g`` and ``w``, summed over output features.
        weight_gradient: ``g`` and ``x``, summed over positions and samples.
    """

    format: BlockFormatName
    forward: ProductRecipe = ProductRecipe()
    input_gradient: ProductRecipe = ProductRecipe()
    weight_gradient: ProductRecipe = ProductRecipe()

    def __post_init__(self) -> None:
        if self.format not in BLOCK_FORMATS:
            raise ConfigError(f"a recipe of format {self.format!r} is unknown: write one of {', '.join(BLOCK_FORMATS)}")
        for name in ("forward", "input_gradient", "weight_gradient"):
            if isinstance(value := getattr(self, name), Mapping):
                object.__setattr__(self, name, ProductRecipe(**value))
        check_kinds(self)
        operands = [each for product in self.products for each in (product.first, product.second)]
        if self.forward.hadamard is not None or self.input_gradient.hadamard is not None:
            raise ConfigError("hadamard goes with weight_gradient: the two other products are not transformed")
        if any(each.square for each in (self.forward.first, self.input_gradient.first, *operands[4:])):
            raise ConfigError("square goes with weights: the second operands of forward and input_gradient")
        if self.format == "fp8" and any(each.square for each in operands):
            raise ConfigError("square changes nothing under format 'fp8', which has no blocks")
        if self.format != "fp8" and any(each.per_row for each in operands):
            raise ConfigError(f"per_row changes nothing under format {self.format!r}, whose scales are those of blocks")
        if self.format == "nvfp4" and any(each.eight != "e4m3" for each in operands):
            raise ConfigError("eight changes nothing under format 'nvfp4', which has no element of 8 bits")

    @property
    def products(self) -> tuple[ProductRecipe, ProductRecipe, ProductRecipe]:
        """The three products, in the order of a training step."""
        return self.forward, self.input_gradient, self.weight_gradient

    @property
    def transforms(self) -> bool:
        """Whether it mixes the samples of a batch before it rounds them."""
        return self.weight_gradient.hadamard is not None


_BY_CHANCE = OperandRecipe(stochastic=True)
_SQUARE = OperandRecipe(square=True)
_WIDE_RANGE = OperandRecipe(eight="e5m2")

RECIPES: dict[str, Recipe] = {
    "mxfp8": Recipe("mx"),
    "mxfp4": Recipe(
        "mx", input_gradient=ProductRecipe(_BY_CHANCE), weight_gradient=ProductRecipe(_BY_CHANCE, hadamard=16)
    ),
    "nvfp4": Recipe(
        "nvfp4",
        forward=ProductRecipe(second=_SQUARE),
        input_gradient=ProductRecipe(_BY_CHANCE, _SQUARE),
        weight_gradient=ProductRecipe(_BY_CHANCE, hadamard=16),
    ),
    "fp8": Recipe("fp8", input_gradient=ProductRecipe(_WIDE_RANGE), weight_gradient=ProductRecipe(_WIDE_RANGE)),
}
"""The recipes in use, by name. ``nvfp4`` is that of arXiv 2509.25149."""


def recipe_of(value: Any) -> Recipe:
    """The recipe of a name, or of the mapping that a saved configuration holds.

    Raises:
        ConfigError: neither; the message offers the names that exist.
    """
    if isinstance(value, Recipe):
        return value
    if isinstance(value, Mapping):
        known = [each.name for each in fields(Recipe)]
        if unknown := [key for key in value if key not in known]:
            raise ConfigError(f"a recipe has no field {unknown[0]!r}; it has {', '.join(known)}")
        return Recipe(**value)
    if not isinstance(value, str) or value not in RECIPES:
        raise ConfigError(
            f"recipe={value!r} is unknown: write one of {', '.join(RECIPES)}, or a Recipe.{near(str(value), RECIPES)}"
        )
    return RECIPES[value]


def elements_of(name: str, how: OperandRecipe, *, gradient: bool) -> dict[int, str]:
    """The element that each width selects for an operand: with 6 bits, gradients get more exponent."""
    chosen = {6: "e3m2"} if gradient else {}
    return {bits: how.eight if bits == 8 else chosen.get(bits, element) for bits, element in _ELEMENTS[name].items()}


def widths_of(name: str, *precisions: Precision) -> str | None:
    """Why a block format cannot hold one of some precisions, with the widths that it has; ``None`` if it can."""
    has = _ELEMENTS[name] | _WIDE
    for precision in precisions:
        for bits in (precision.fw, precision.bw):
            if bits and bits not in has:
                offer = ", ".join(f"{width} ({element})" for width, element in has.items())
                return f"{precision} needs a width of {bits} bits, which format {name!r} lacks: it has {offer}"
    return None


def check_recipe(config: FracConfig) -> None:
    """Raise a ``ConfigError`` for a recipe, or settings of a block format, that do not fit together."""
    if config.format not in BLOCK_FORMATS:
        if config.recipe is not None:
            raise ConfigError(
                f"recipe={config.recipe!r} changes nothing with format={config.format!r}: it goes with "
                f"{', '.join(map(repr, BLOCK_FORMATS))}"
            )
        return
    recipe = config.product_recipe
    if config.recipe is not None and recipe_of(config.recipe).format != config.format:
        raise ConfigError(
            f"recipe={config.recipe!r} is one of format {recipe_of(config.recipe).format!r}: write that format, or "
            f"leave the recipe out for the usual one of {config.format!r}"
        )
    if config.method == "float":
        return
    steered = config.gate_options if config.gated else config.precision_stages
    weights = [Precision(config.gate_weight_bits, config.gate_weight_bits)] if config.gated else []
    lacks = widths_of(config.format, *steered, *(pin.precision for pin in config.pins))
    if lacks is None and (lacks := widths_of(config.format, *weights)) is not None:
        lacks = f"weight_bits={config.weight_bits}: {lacks}"
    if lacks is not None:
        raise ConfigError(lacks)
    if config.gated and recipe is not None and recipe.transforms:
        raise ConfigError(
            f"format={config.format!r} would use a Hadamard transform, which mixes samples, and the gates of method "
            f"{config.method!r} give each sample its own bits: write a recipe without hadamard, such as format='mx' "
            "with recipe='mxfp8'"
        )
    for name, usual in (("saved", "operands"), ("mixing", "inputs")):
        if getattr(config, name) != usual:
            raise ConfigError(
                f"{name}={getattr(config, name)!r} does not go with format={config.format!r}, which rounds operands "
                f"anew for each product: write {name}={usual!r}"
            )
