"""Recipes of the block formats: which one a configuration means, and what does not fit together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fractrain_fx import FracConfig, Pin, Precision
from fractrain_fx.config import RECIPES, OperandRecipe, ProductRecipe, Recipe
from fractrain_fx.config.checks import check_stage
from fractrain_fx.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "recipe"),
    [
        ({"format": "affine"}, None),
        ({"format": "mx"}, "mxfp8"),
        ({"format": "mx", "precision": "4/4"}, "mxfp4"),
        ({"format": "mx", "precision": "4/8"}, "mxfp8"),
        ({"format": "mx", "precision": "4/4", "recipe": "mxfp8"}, "mxfp8"),
        ({"format": "mx", "method": "pfq", "stages": "FW(4,8)/BW(4,8)"}, "mxfp4"),
        ({"format": "nvfp4", "precision": "4/4"}, "nvfp4"),
        ({"format": "fp8", "pins": (Pin("last", Precision(16, 16)),)}, "fp8"),
        ({"format": "int"}, "jetfire"),
        ({"format": "int", "recipe": "switchback"}, "switchback"),
    ],
    ids=str,
)
def test_the_recipe_that_a_configuration_means(words: dict[str, Any], recipe: str | None) -> None:
    config = FracConfig(**{"method": "static", **words})
    assert config.product_recipe == (None if recipe is None else RECIPES[recipe])


def test_a_recipe_of_ones_own_is_saved(tmp_path: Path) -> None:
    recipe = Recipe("mx", weight_gradient=ProductRecipe(OperandRecipe(True, "e5m2"), hadamard=32))
    others = ProductRecipe(format="int")
    for given in (recipe, "mxfp4", None, Recipe("mx", input_gradient=others, weight_gradient=others)):
        config = FracConfig(method="static", format="mx", recipe=given)
        config.to_yaml(tmp_path / "config.yaml")
        assert FracConfig.from_yaml(tmp_path / "config.yaml") == config


OPTIONS = ("0/0", "4/8", "8/8")
FP8 = ProductRecipe(format="fp8")
AGAIN, EDEN = OperandRecipe(again=True), OperandRecipe(eden=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            {"format": "mx", "precision": "3/6"},
            "FW-3/BW-6 needs a width of 3 bits.* it has 4 .e2m1., 6 .e2m3., 8",
        ),
        ({"format": "nvfp4"}, "8 bits, which format 'nvfp4' lacks: it has 4 .e2m1., 16 .bfloat16., 32 .float."),
        ({"format": "mx", "pins": (Pin("last", Precision(5, 8)),)}, "FW-5/BW-8 needs a width of 5 bits"),
        (
            {"format": "fp8", "method": "dfq", "options": ("0/0", "8/8"), "weight_bits": 6},
            "weight_bits=6: .* width of 6 bits",
        ),
        ({"format": "mx", "method": "dfq", "options": OPTIONS, "recipe": "mxfp4"}, "Hadamard transform mixes values"),
        ({"format": "mx", "recipe": "mxfp"}, "recipe='mxfp' is unknown: write one of mxfp8.* Did you mean"),
        ({"format": "mx", "recipe": {"formt": "mx"}}, "Recipe has no field 'formt'; it has .* Did you mean 'format'"),
        ({"format": "mx", "recipe": {"forward": {}}}, "a recipe needs a format"),
        ({"format": "mx", "recipe": "nvfp4"}, "recipe='nvfp4' is one of format 'nvfp4'"),
        ({"format": "int", "method": "dfq", "options": OPTIONS, "recipe": "switchback"}, "does not go with gates"),
        ({"format": "affine", "recipe": "mxfp4"}, "recipe=mxfp4 changes nothing for format 'affine'"),
        (
            {"format": "mx", "precision": "8/4", "recipe": Recipe("mx", input_gradient=ProductRecipe(format="nvfp4"))},
            "FW-8/BW-4 needs a width of 8 bits in its input gradient, which format 'nvfp4' lacks.*by_product=True",
        ),
        (
            {"format": "mx", "precision": "4/8", "recipe": Recipe("mx", FP8)},
            "width of 4 bits in its forward, which format 'fp8' lacks: it has 8 .e4m3., 16 .bfloat16., 32 .float.$",
        ),
        (
            {"format": "mx", "pins": (Pin("last", "8/8"),), "precision": "8/4", "recipe": "mxfp8-nvfp4"},
            "FW-8/BW-8 needs a width of 8 bits in its input gradient",
        ),
        ({"format": "nvfp4", "precision": "8/4", "recipe": "mxfp8-nvfp4"}, "is one of format 'mx'"),
        (
            {"format": "mx", "method": "dfq", "options": ("0/0", "8/8"), "recipe": Recipe("mx", FP8), "weight_bits": 4},
            "weight_bits=4: FW-8/BW-8 needs a width of 4 bits in its forward",
        ),
    ],
    ids=str,
)
def test_what_does_not_fit_together(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FracConfig(**{"method": "static", **words})


UNKNOWN = {"foo": 1}


def made(kind: Any, **fields: Any) -> object:
    """A part of a recipe, also of values that its types refuse."""
    return kind(**fields)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: made(Recipe, format="mxfp4"), "format 'mxfp4' is unknown: write one of mx, nvfp4, fp8, int"),
        (lambda: Recipe("mx", forward=ProductRecipe(rows=16)), "rows goes with input_gradient"),
        (lambda: ProductRecipe(rows=3), "rows=3 must be a power of two"),
        (lambda: Recipe("mx", ProductRecipe(hadamard=16), ProductRecipe(second=AGAIN)), "its hadamard mixes"),
        (lambda: Recipe("mx", ProductRecipe(second=AGAIN)), "again goes with the second operands of both gradients"),
        (lambda: Recipe("mx", weight_gradient=ProductRecipe(AGAIN)), "again goes with the second operands"),
        (lambda: OperandRecipe(eden=True, stochastic=True), "leave stochastic, four_over_six, square and block out"),
        (lambda: Recipe("nvfp4", weight_gradient=ProductRecipe(EDEN)), "eden goes with gradients that have a Hadamard"),
        (lambda: Recipe("nvfp4", ProductRecipe(EDEN, hadamard=16)), "eden goes with gradients that have a Hadamard"),
        (lambda: Recipe("mx", weight_gradient=ProductRecipe(EDEN, hadamard=16)), "eden goes with format 'nvfp4'"),
        (
            lambda: Recipe("nvfp4", ProductRecipe(second=OperandRecipe(square=True, block=64))),
            "square and block do not",
        ),
        (lambda: ProductRecipe(hadamard=24), "hadamard=24 must be a power of two"),
        (lambda: Recipe("mx", forward=ProductRecipe(OperandRecipe(square=True))), "square goes with weights"),
        (lambda: Recipe("fp8", forward=ProductRecipe(second=OperandRecipe(square=True))), "without blocks"),
        (lambda: Recipe("mx", forward=ProductRecipe(OperandRecipe(per_row=True))), "per_row changes nothing"),
        (lambda: Recipe("nvfp4", forward=ProductRecipe(OperandRecipe(eight="e5m2"))), "eight changes nothing"),
        (lambda: Recipe("int", forward=ProductRecipe(OperandRecipe(eight="e5m2"))), "eight changes nothing"),
        (lambda: Recipe("mx", forward=ProductRecipe(OperandRecipe(block=64))), "block changes nothing under format"),
        (lambda: Recipe("fp8", forward=ProductRecipe(OperandRecipe(four_over_six=True))), "goes with format 'nvfp4'"),
        (lambda: OperandRecipe(square=True, per_row=True), "two kinds of blocks"),
        (lambda: OperandRecipe(block=64, per_row=True), "block and per_row name two kinds"),
        (lambda: OperandRecipe(stochastic=True, four_over_six=True), "leave stochastic out"),
        (lambda: ProductRecipe(hadamard=16, bfloat16=True), "bfloat16 leaves nothing to round"),
        (lambda: made(ProductRecipe, first=UNKNOWN), "OperandRecipe has no field 'foo'; it has stochastic, eight"),
        (
            lambda: made(Recipe, format="mx", forward=UNKNOWN),
            "ProductRecipe has no field 'foo'; it has first, second",
        ),
        (lambda: made(OperandRecipe, eight="e4m4"), "eight='e4m4' is unknown: write one of e4m3, e5m2"),
        (lambda: ProductRecipe(bfloat16=True, format="mx"), "bfloat16 leaves nothing to round"),
        (lambda: made(ProductRecipe, format="mxfp8"), "format='mxfp8' is unknown: write one of mx, nvfp4, fp8, int"),
        (lambda: Recipe("int", ProductRecipe(OperandRecipe(block=64), format="mx")), "block changes nothing under"),
        (lambda: Recipe("nvfp4", ProductRecipe(OperandRecipe(four_over_six=True), format="mx")), "goes with format"),
    ],
)
def test_recipes_that_mean_nothing(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_weight_with_bits_of_its_own_is_not_an_operand_of_the_weight_gradient() -> None:
    recipe = Recipe("mx", weight_gradient=FP8)
    FracConfig(method="dfq", format="mx", options=("0/0", "8/8"), recipe=recipe, weight_bits=4)


def test_a_stage_is_checked_against_the_widths() -> None:
    config = FracConfig(method="static", format="mx")
    check_stage(config, Precision(4, 8))
    with pytest.raises(ConfigError, match="needs a width of 3 bits"):
        check_stage(config, Precision(3, 8))
