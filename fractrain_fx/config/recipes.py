"""Recipes of the block formats: how the two operands of each product of a training step are rounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from fractrain_fx.config.precision import FLOAT_BITS, Precision
from fractrain_fx.config.products import BLOCK_FORMATS, OperandRecipe, ProductRecipe, Recipe
from fractrain_fx.errors import ConfigError, near

if TYPE_CHECKING:
    from fractrain_fx.config import FracConfig

__all__ = [
    "RECIPES",
    "SCALE_BITS",
    "check_recipe",
    "elements_of",
    "recipe_of",
    "usual_recipe",
    "widths_of",
]

SCALE_BITS = {
    "mx": "8 bits for 32 values",
    "nvfp4": "8 bits for 16 values",
    "fp8": "32 bits for a tensor, a row or a block",
    "int": "32 bits for a tensor, a row or a block",
}
"""The bits of scales, which costs leave out."""

# The element that a width selects in each format.
_ELEMENTS: dict[str, dict[int, str]] = {
    "mx": {4: "e2m1", 6: "e2m3", 8: "e4m3"},
    "nvfp4": {4: "e2m1"},
    "fp8": {8: "e4m3"},
    "int": {4: "int4", 6: "int6", 8: "int8"},
}
# Two widths that are the same in all of them.
_WIDE = {16: "bfloat16", FLOAT_BITS: "float"}


_BY_CHANCE = OperandRecipe(stochastic=True)
_SQUARE = OperandRecipe(square=True)
_WIDE_RANGE = OperandRecipe(eight="e5m2")
_ROW = OperandRecipe(per_row=True)
_SQUARE_BY_CHANCE = OperandRecipe(stochastic=True, square=True)
_TILE, _SQUARE_TILE = OperandRecipe(block=128), OperandRecipe(block=128, square=True)
_FOUR_OVER_SIX = OperandRecipe(four_over_six=True)
_SQUARE_FOUR_OVER_SIX = OperandRecipe(square=True, four_over_six=True)

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
    "four-over-six": Recipe(
        "nvfp4",
        forward=ProductRecipe(_FOUR_OVER_SIX, _SQUARE_FOUR_OVER_SIX),
        input_gradient=ProductRecipe(_BY_CHANCE, _SQUARE_FOUR_OVER_SIX),
        weight_gradient=ProductRecipe(_BY_CHANCE, _FOUR_OVER_SIX, hadamard=16),
    ),
    "fp8": Recipe("fp8", input_gradient=ProductRecipe(_WIDE_RANGE), weight_gradient=ProductRecipe(_WIDE_RANGE)),
    "deepseek": Recipe(
        "fp8",
        forward=ProductRecipe(_TILE, _SQUARE_TILE),
        input_gradient=ProductRecipe(_TILE, _SQUARE_TILE),
        weight_gradient=ProductRecipe(_TILE, _TILE),
    ),
    "jetfire": Recipe(
        "int",
        forward=ProductRecipe(_SQUARE, _SQUARE),
        input_gradient=ProductRecipe(_SQUARE_BY_CHANCE, _SQUARE),
        weight_gradient=ProductRecipe(_SQUARE_BY_CHANCE, _SQUARE),
    ),
    "int8": Recipe("int", ProductRecipe(_ROW, _ROW), ProductRecipe(_ROW, _ROW), ProductRecipe(_ROW, _ROW)),
    "switchback": Recipe(
        "int",
        forward=ProductRecipe(_ROW),
        input_gradient=ProductRecipe(_ROW),
        weight_gradient=ProductRecipe(bfloat16=True),
    ),
}
"""The recipes in use, by name: ``nvfp4`` is that of arXiv 2509.25149, ``four-over-six`` that of arXiv 2512.02010,
``deepseek`` has the blocks of arXiv 2412.19437, ``jetfire`` the operands of arXiv 2403.12422, ``int8`` those of
torchao's int8 training, and ``switchback`` those of arXiv 2304.13013."""

_USUAL = {"nvfp4": "nvfp4", "fp8": "fp8", "int": "jetfire"}


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
        if "format" not in value:
            raise ConfigError("a recipe needs a format: write format: mx, or the name of a recipe, such as mxfp8")
        return Recipe(**value)
    if not isinstance(value, str) or value not in RECIPES:
        raise ConfigError(
            f"recipe={value!r} is unknown: write one of {', '.join(RECIPES)}, or a Recipe.{near(str(value), RECIPES)}"
        )
    return RECIPES[value]


def usual_recipe(format: str, *, narrow: bool = False) -> Recipe:
    """The recipe of a block format without one; ``narrow``: some stage has gradients of fewer than 8 bits."""
    return RECIPES[_USUAL.get(format, "mxfp4" if narrow else "mxfp8")]


def elements_of(name: str, how: OperandRecipe, *, gradient: bool) -> dict[int, str]:
    """The element that each width selects for an operand: with 6 bits, gradients under ``mx`` get more exponent."""
    chosen: dict[int, str] = {8: how.eight} if name in ("mx", "fp8") else {}
    chosen |= {6: "e3m2"} if name == "mx" and gradient else {}
    return _ELEMENTS[name] | chosen


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
    pinned = [each for pin in config.pins if not pin.named for each in pin.stages]
    lacks = widths_of(config.format, *steered, *pinned)
    if lacks is None and (lacks := widths_of(config.format, *weights)) is not None:
        lacks = f"weight_bits={config.weight_bits}: {lacks}"
    if lacks is not None:
        raise ConfigError(lacks)
    if config.gated and recipe is not None and (reason := _unfit_for_gates(recipe)) is not None:
        raise ConfigError(f"format={config.format!r} with method {config.method!r}: {reason}")


def _unfit_for_gates(recipe: Recipe) -> str | None:
    """Why gates, which give each sample its own bits, cannot choose the bits under a recipe."""
    if recipe.by_product:
        return (
            "a recipe with by_product gives weights the backward bits, which the gates choose for each sample: leave "
            "by_product out"
        )
    if recipe.transforms:
        return (
            "its Hadamard transform mixes samples, and the gates give each sample its own bits: write a recipe without "
            "hadamard, such as format='mx' with recipe='mxfp8'"
        )
    if any(recipe.least):
        return (
            "a recipe with a product in bfloat16 does not go with gates, which choose the bits of all products: write "
            "another recipe, or method 'static' or 'pfq'"
        )
    return None
