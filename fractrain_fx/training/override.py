"""Settings that override others: those of a recipe, then a file's or the command line's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fractrain_fx.zoo.recipes import read_recipe

__all__ = ["from_recipe", "overridden"]


def from_recipe(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """``values`` over the settings of the recipe that they name; as they are if they name none.

    Raises:
        ConfigError: the recipe is unknown.
    """
    name = values.get("recipe")
    return values if name is None else overridden(read_recipe(name)["settings"], values)


def overridden(start: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """``start`` with the values of ``given``. Gate settings are replaced one by one.

    ``iterations`` would override ``epochs``, so ``epochs`` in ``given`` removes those of ``start``.
    """
    values = {**start, **given}
    if "epochs" in given and "iterations" not in given:
        values["iterations"] = None
    before, changes = start.get("gate"), given.get("gate")
    if isinstance(before, Mapping) and isinstance(changes, Mapping):
        values["gate"] = {**before, **changes}
    return values
