"""Rules for single contractions: what they may name, and how they are written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fractrain_fx import FracConfig, Pin, Precision, PrecisionStages
from fractrain_fx.config import RECIPES, Recipe
from fractrain_fx.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "pin", "number_format", "recipe"),
    [
        ("a.*=FW-8/BW-16", Pin("a.*", Precision(8, 16)), None, None),
        ("last=bfloat16", Pin("last", Precision(16, 16), "bfloat16"), "mx", RECIPES["mxfp8"]),
        ("last=float", Pin("last", Precision(32, 32), "float"), None, None),
        ("last=mxfp8", Pin("last", Precision(8, 8), recipe="mxfp8"), "mx", RECIPES["mxfp8"]),
        ("h.?=mxfp4", Pin("h.?", recipe="mxfp4"), "mx", RECIPES["mxfp4"]),
        ("last=mxfp4:4/8", Pin("last", Precision(4, 8), recipe="mxfp4"), "mx", RECIPES["mxfp4"]),
        ("last=mx:FW-4/BW-8", Pin("last", Precision(4, 8), "mx"), "mx", RECIPES["mxfp8"]),
        ("last=mx:FW-8/BW-4", Pin("last", Precision(8, 4), "mx"), "mx", RECIPES["mxfp4"]),
        ("last=affine:FW-5/BW-6", Pin("last", Precision(5, 6), "affine"), "affine", None),
        ("a=FW(3,8)/BW(4,6)", Pin("a", PrecisionStages.parse("FW(3,8)/BW(4,6)")), None, None),
        ("a=mx:FW(4,8)/BW(8,8)", Pin("a", "FW(4,8)/BW(8,8)", "mx"), "mx", RECIPES["mxfp8"]),
        ("a=FW(8)/BW(8)", Pin("a", Precision(8, 8)), None, None),
        ("last=nvfp4", Pin("last", Precision(4, 4), recipe="nvfp4"), "nvfp4", RECIPES["nvfp4"]),
    ],
)
def test_a_pin_may_name_a_format_or_a_recipe(
    text: str, pin: Pin, number_format: str | None, recipe: Recipe | None
) -> None:
    assert Pin.parse(text) == pin and Pin.parse(str(pin)) == pin
    assert (pin.number_format, pin.product_recipe) == (number_format, recipe)
    config = FracConfig(method="pfq", stages="FW(3,8)/BW(6,8)", pins=(pin,))
    assert FracConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert FracConfig.from_dict({"method": "pfq", "stages": "FW(3,8)/BW(6,8)", "pins": [text]}) == config


def test_a_recipe_of_ones_own_is_kept_in_files() -> None:
    config = FracConfig(method="static", pins=(Pin("last", "4/16", recipe=Recipe("mx", by_product=True)),))
    assert FracConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"precision": "0/0"}, "would remove the op"),
        ({}, "does not say its bits"),
        ({"format": "mx"}, "does not say its bits"),
        ({"format": "mxfp9"}, "the format is unknown"),
        ({"recipe": "mxfp9"}, "is unknown: write one of"),
        ({"format": "nvfp4", "recipe": "mxfp8"}, "the recipe is one of format 'mx'"),
        ({"format": "bfloat16", "precision": "8/8"}, "leave FW-8/BW-8 out"),
        ({"format": "fp8", "precision": "4/4"}, "format 'fp8' lacks"),
        ({"format": "mx", "precision": "FW(4,5)/BW(8,8)"}, "format 'mx' lacks"),
        ({"precision": "FW(0,8)/BW(0,8)"}, "a stage of 0 bits"),
    ],
)
def test_pins_that_mean_nothing_are_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Pin("last", **words)


def test_text_without_a_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match="write PATTERN=PRECISION"):
        Pin.parse("last")
