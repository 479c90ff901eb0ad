"""Variants of a recipe: steered as the paper says, and as the authors' code does where that differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fractrain_fx.config import AUTHORS_OPTIONS, FracConfig
from fractrain_fx.engine.controller import authors_beta
from fractrain_fx.errors import ConfigError

__all__ = ["AS_THE_CODE", "AS_THE_PAPER", "split_name", "varied"]

AS_THE_PAPER, AS_THE_CODE = "-as-the-paper", "-as-the-code"

_GATED = ("dfq", "fractrain", "slu")
_CODE_OPTIONS = {"imagenet": ["FW-3/BW-6", "FW-4/BW-8", "FW-6/BW-12", "FW-8/BW-16"]}
_PROJECTIONS = {"pattern": "*.downsample.*", "precision": "FW-32/BW-32"}


def split_name(name: str) -> tuple[str, str]:
    """The recipe and the variant (or ``""``) that a name stands for."""
    for variant in (AS_THE_PAPER, AS_THE_CODE):
        if name.endswith(variant):
            return name.removesuffix(variant), variant
    return name, ""


def varied(name: str, values: Mapping[str, Any], variant: str) -> dict[str, Any]:
    """The settings of a variant.

    ``-as-the-paper`` steers by the sign of the distance to the target (section 3.2). ``-as-the-code`` also takes from
    the authors' code what the paper leaves open: strength of the cost term, options, an indicator that sees the cost
    term, and projections in float on ImageNet. On CIFAR that code also runs each block at every option and mixes the
    results, which no variant does. Initialisation and learning rate of the gates are the authors' in every recipe.

    Args:
        name: of the recipe, for the error.
        values: its settings.
        variant: ``-as-the-paper`` or ``-as-the-code``.

    Raises:
        ConfigError: the recipe has no gates, so that paper and code agree on it.
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
