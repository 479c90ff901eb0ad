"""The recipes of ``recipes.yaml``, and their variants: as the paper steers, and as the authors' code does."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from importlib.resources import files
from typing import Any

from fractrain_fx.config import AUTHORS_OPTIONS, FracConfig, paper_values
from fractrain_fx.engine.cost_term import authors_beta
from fractrain_fx.errors import ConfigError, near

__all__ = ["AS_THE_CODE", "AS_THE_PAPER", "read_recipe", "recipe_names"]

AS_THE_PAPER, AS_THE_CODE = "-as-the-paper", "-as-the-code"

_GATED = ("dfq", "fractrain", "slu")
_CODE_OPTIONS = {"imagenet": ["FW-3/BW-6", "FW-4/BW-8", "FW-6/BW-12", "FW-8/BW-16"]}
_PROJECTIONS = {"pattern": "*.downsample.*", "precision": "FW-32/BW-32"}
# The recipes steer by a multiplier, as their measured runs did; those as the paper take its sign.
_CONTROL = {"control": "multiplier"}


@cache
def _recipes() -> dict[str, Any]:
    import yaml

    text = (files(__package__) / "recipes.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text)["recipes"])


def recipe_names() -> list[str]:
    """The names of all recipes, in order."""
    return sorted(_recipes())


def read_recipe(name: str) -> dict[str, Any]:
    """The entries of a recipe; ``settings`` are those of the variant that the name ends with.

    Args:
        name: of the recipe; it may end with ``-as-the-paper`` or ``-as-the-code``.

    Raises:
        ConfigError: the name is unknown (the message has near names), or the recipe has no such variant.
    """
    plain, variant = _split(str(name))
    if plain not in _recipes():
        offer = near(str(name), recipe_names())
        raise ConfigError(f"recipe {name!r} is unknown.{offer} 'fractrain zoo list' names them all")
    entries: dict[str, Any] = deepcopy(_recipes()[plain])
    settings = entries["settings"]
    paper = dict(paper_values(settings["method"]))
    if "gate" in paper:
        paper["gate"] = paper["gate"] | _CONTROL | settings.pop("gate", {})
    entries["settings"] = paper | settings
    if variant:
        entries["settings"] = _varied(plain, entries["settings"], variant)
    return entries


def _split(name: str) -> tuple[str, str]:
    """The recipe and the variant (or ``""``) that a name stands for."""
    for variant in (AS_THE_PAPER, AS_THE_CODE):
        if name.endswith(variant):
            return name.removesuffix(variant), variant
    return name, ""


def _varied(name: str, values: Mapping[str, Any], variant: str) -> dict[str, Any]:
    """The settings of a variant.

    ``-as-the-paper`` steers by the sign of the distance to the target (section 3.2). ``-as-the-code`` also takes from
    the authors' code what the paper leaves open: strength of the cost term, options, an indicator that sees the cost
    term, and projections in float on ImageNet. On CIFAR that code also runs each block at every option and mixes the
    results, which no variant does. Initialisation and learning rate of the gates are the authors' in every recipe.
    """
    if values["method"] not in _GATED:
        raise ConfigError(f"recipe {name!r} has no gates, and without them paper and code agree: drop {variant!r}")
    gate = dict(values.get("gate", {})) | {"control": "sign"}
    if variant == AS_THE_PAPER:
        return dict(values) | {"gate": gate}
    changed: dict[str, Any] = {"targets": {"per_cent": values["targets"], "saturate": True}}
    if values["method"] == "fractrain":
        changed["schedule"] = {"kind": "auto", **values["schedule"], "indicator": "total"}
    if values["method"] != "slu" and "mobilenet" not in values["model"]:
        changed["options"] = _CODE_OPTIONS.get(values["data"], list(map(str, AUTHORS_OPTIONS)))
    if values["data"] == "imagenet":
        changed["pins"] = [*values.get("pins", []), _PROJECTIONS]
    changed = dict(values) | changed
    steering = ("method", "options", "weight_bits")
    gates = FracConfig.from_dict({name: changed[name] for name in steering if name in changed})
    return changed | {"gate": gate | {"beta": authors_beta(gates.gate_options, gates.gate_weight_bits)}}
