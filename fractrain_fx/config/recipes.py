"""Recipes of the block formats: how the two operands of each product of a training step are rounded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fractrain_fx.config.kinds import known_keys
from fractrain_fx.config.precision import FLOAT_BITS, Precision
from fractrain_fx.config.products import PRODUCTS, OperandRecipe, ProductName, ProductRecipe, Recipe
from fractrain_fx.errors import ConfigError, near

if TYPE_CHECKING:
    from fractrain_fx.config import FracConfig

__all__ = [
    "RECIPES",
    "RECIPE_BITS",
    "SCALE_BITS",
    "check_recipe",
    "elements_of",
    "named",
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
_TILE_BY_CHANCE = OperandRecipe(stochastic=True, block=128)
_TILE_AGAIN = OperandRecipe(stochastic=True, block=128, again=True)
_EDEN, _EDEN_AGAIN = OperandRecipe(eden=True), OperandRecipe(eden=True, again=True)

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
    "mxfp8-nvfp4": Recipe(
        "mx",
        input_gradient=ProductRecipe(_BY_CHANCE, format="nvfp4"),
        weight_gradient=ProductRecipe(_BY_CHANCE, hadamard=16, format="nvfp4"),
        by_product=True,
    ),
    "four-over-six": Recipe(
        "nvfp4",
        forward=ProductRecipe(_FOUR_OVER_SIX, _SQUARE_FOUR_OVER_SIX),
        input_gradient=ProductRecipe(_BY_CHANCE, _SQUARE_FOUR_OVER_SIX),
        weight_gradient=ProductRecipe(_BY_CHANCE, _FOUR_OVER_SIX, hadamard=16),
    ),
    "tetrajet-v2": Recipe(
        "nvfp4",
        forward=ProductRecipe(_TILE, _TILE),
        input_gradient=ProductRecipe(_TILE_BY_CHANCE, _TILE_AGAIN, hadamard=16),
        weight_gradient=ProductRecipe(_TILE_BY_CHANCE, _TILE_AGAIN, hadamard=16),
    ),
    "quartet-ii": Recipe(
        "nvfp4",
        forward=ProductRecipe(_FOUR_OVER_SIX, _FOUR_OVER_SIX),
        input_gradient=ProductRecipe(_EDEN, _EDEN_AGAIN, hadamard=128),
        weight_gradient=ProductRecipe(_EDEN, _EDEN_AGAIN, hadamard=128),
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
    "halo": Recipe("int", forward=ProductRecipe(hadamard=128), input_gradient=ProductRecipe(rows=128)),
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
torchao's int8 training, and ``switchback`` those of arXiv 2304.13013. ``mxfp8-nvfp4`` has a format for each product:
that of ``mxfp8`` forward, and the gradients of ``nvfp4`` without its square weights.

``tetrajet-v2`` has the rounding of arXiv 2510.27527: double-block scales, and gradients of the numbers that the forward
product multiplied. Its oscillation reset (OsciReset, of the optimizer) and its channels kept in MXFP8 (OutControl) are
not part of it. ``quartet-ii`` is that of arXiv 2601.22813, with MS-EDEN in the gradients and four over six forward.
``halo`` is HALO-2 in INT8 of arXiv 2501.02625, with transforms of 128 values where the source has whole rows."""

_NARROW = ("mxfp4", "nvfp4", "four-over-six", "tetrajet-v2", "quartet-ii")
RECIPE_BITS = (
    dict.fromkeys(RECIPES, Precision(8, 8)) | dict.fromkeys(_NARROW, Precision(4, 4)) | {"mxfp8-nvfp4": Precision(8, 4)}
)
"""The bits that the name of a recipe alone stands for."""

_USUAL = {"nvfp4": "nvfp4", "fp8": "fp8", "int": "jetfire"}


def recipe_of(value: Any) -> Recipe:
    """The recipe of a name, or of the mapping that a saved configuration holds.

    Raises:
        ConfigError: neither; the message offers the names that exist.
    """
    if isinstance(value, Recipe):
        return value
    if isinstance(value, Mapping):
        known_keys(Recipe, value)
        if "format" not in value:
            raise ConfigError("a recipe needs a format: write format: mx, or the name of a recipe, such as mxfp8")
        return Recipe(**value)
    if not isinstance(value, str) or value not in RECIPES:
        raise ConfigError(
            f"recipe={value!r} is unknown: write one of {', '.join(RECIPES)}, or a Recipe.{near(str(value), RECIPES)}"
        )
    return RECIPES[value]


def named(recipe: Recipe) -> str | Recipe:
    """The name of a recipe in use; any other recipe as it is."""
    return next((name for name, known in RECIPES.items() if known == recipe), recipe)


def usual_recipe(format: str, *, narrow: bool = False) -> Recipe:
    """The recipe of a block format without one; ``narrow``: some stage has gradients of fewer than 8 bits."""
    return RECIPES[_USUAL.get(format, "mxfp4" if narrow else "mxfp8")]


def elements_of(name: str, how: OperandRecipe, *, gradient: bool) -> dict[int, str]:
    """The element that each width selects for an operand: with 6 bits, gradients under ``mx`` get more exponent."""
    chosen: dict[int, str] = {8: how.eight} if name in ("mx", "fp8") else {}
    chosen |= {6: "e3m2"} if name == "mx" and gradient else {}
    return _ELEMENTS[name] | chosen


def widths_of(recipe: Recipe, *precisions: Precision, weight_bits: int | None = None) -> str | None:
    """Why the formats of a recipe cannot hold some precisions, with the widths that they have; ``None`` if they can.

    Args:
        recipe: of an op.
        precisions: its stages or options.
        weight_bits: bits of weights that have bits of their own.
    """
    for precision in (precision for precision in precisions if not precision.skips):
        for product, name in zip(PRODUCTS, recipe.formats, strict=True):
            has = _ELEMENTS[name] | _WIDE
            for place, bits in enumerate(recipe.bits_of(product, precision, weight_bits)):
                if bits and bits not in has:
                    of_weight = weight_bits is not None and place == 1 and product != "weight_gradient"
                    return (f"weight_bits={bits}: " if of_weight else "") + _lacking(recipe, product, precision, bits)
    return None


def _lacking(recipe: Recipe, product: ProductName, precision: Precision, bits: int) -> str:
    name = recipe.formats[PRODUCTS.index(product)]
    offer = ", ".join(f"{width} ({element})" for width, element in (_ELEMENTS[name] | _WIDE).items())
    several = len(set(recipe.formats)) > 1
    where = f" in its {product.replace('_', ' ')}" if several else ""
    reason = f"{precision} needs a width of {bits} bits{where}, which format {name!r} lacks: it has {offer}"
    if several and not recipe.by_product and product != "forward":
        reason += ". A recipe with by_product=True gives both operands of a gradient product the backward bits"
    return reason


def check_recipe(config: FracConfig) -> None:
    """Raise a ``ConfigError`` for a recipe, or settings of a block format, that do not fit together."""
    recipe = config.product_recipe
    if recipe is None:
        return
    if recipe.format != config.format:
        raise ConfigError(
            f"recipe={config.recipe!r} is one of format {recipe.format!r}: write that format, or leave the recipe out "
            f"for the usual one of {config.format!r}"
        )
    if config.method == "float":
        return
    if config.gated and (reason := _unfit_for_gates(recipe)) is not None:
        raise ConfigError(f"format={config.format!r} with method {config.method!r}: {reason}")
    pinned = [stage for pin in config.pins if not pin.named for stage in pin.stages]
    steered, weights = (
        (config.gate_options, config.gate_weight_bits) if config.gated else (config.precision_stages, None)
    )
    lacks = widths_of(recipe, *steered, weight_bits=weights) or widths_of(recipe, *pinned)
    if lacks is not None:
        raise ConfigError(lacks)


def _unfit_for_gates(recipe: Recipe) -> str | None:
    """Why gates, which give each sample its own bits, cannot choose the bits under a recipe."""
    if recipe.by_product:
        return (
            "a recipe with by_product gives weights the backward bits, which the gates choose for each sample: leave "
            "by_product out"
        )
    if recipe.transforms:
        return (
            "its Hadamard transform mixes values, and the gates give each sample its own bits: write a recipe without "
            "hadamard and rows, such as format='mx' with recipe='mxfp8'"
        )
    if any(recipe.least):
        return (
            "a recipe with a product in bfloat16 does not go with gates, which choose the bits of all products: write "
            "another recipe, or method 'static' or 'pfq'"
        )
    return None
