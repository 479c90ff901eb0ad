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
    for given in (recipe, "mxfp4", None):
        config = FracConfig(method="static", format="mx", recipe=given)
        config.to_yaml(tmp_path / "config.yaml")
        assert FracConfig.from_yaml(tmp_path / "config.yaml") == config


OPTIONS = ("0/0", "4/8", "8/8")


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
        ({"format": "mx", "method": "dfq", "options": OPTIONS, "recipe": "mxfp4"}, "Hadamard transform mixes"),
        ({"format": "mx", "recipe": "mxfp"}, "recipe='mxfp' is unknown: write one of mxfp8.* Did you mean"),
        ({"format": "mx", "recipe": {"formt": "mx"}}, "a recipe has no field 'formt'"),
        ({"format": "mx", "recipe": {"forward": {}}}, "a recipe needs a format"),
        ({"format": "mx", "recipe": "nvfp4"}, "recipe='nvfp4' is one of format 'nvfp4'"),
        ({"format": "int", "method": "dfq", "options": OPTIONS, "recipe": "switchback"}, "does not go with gates"),
        ({"format": "affine", "recipe": "mxfp4"}, "recipe=mxfp4 changes nothing for format 'affine'"),
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
        (lambda: Recipe("mx", forward=ProductRecipe(hadamard=16)), "hadamard goes with weight_gradient"),
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
        (
            lambda: made(ProductRecipe, first=UNKNOWN),
            "first of a recipe has no field 'foo'; it has stochastic, eight",
        ),
        (
            lambda: made(Recipe, format="mx", forward=UNKNOWN),
            "forward of a recipe has no field 'foo'; it has first, second",
        ),
        (lambda: made(OperandRecipe, eight="e4m4"), "eight='e4m4' is unknown: write one of e4m3, e5m2"),
    ],
)
def test_recipes_that_mean_nothing(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_stage_is_checked_against_the_widths() -> None:
    config = FracConfig(method="static", format="mx")
    check_stage(config, Precision(4, 8))
    with pytest.raises(ConfigError, match="needs a width of 3 bits"):
        check_stage(config, Precision(3, 8))
