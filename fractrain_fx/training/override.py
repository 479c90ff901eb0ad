"""Settings that override others: those of a recipe, then a file's or the command line's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fractrain_fx.config.plain import GROUPS
from fractrain_fx.config.schedule import SCHEDULES, ByLength
from fractrain_fx.zoo.recipes import read_recipe

__all__ = ["from_recipe", "merged", "overridden"]


def from_recipe(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """``values`` over the settings of the recipe that they name; as they are if they name none.

    Raises:
        ConfigError: the recipe is unknown.
    """
    name = values.get("recipe")
    return values if name is None else overridden(read_recipe(name)["settings"], values)


def overridden(start: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """``start`` with the values of ``given``, as :func:`merged` puts them together.

    ``iterations`` would override ``epochs``, so ``epochs`` in ``given`` removes those of ``start``.
    """
    values = merged(start, given)
    if "epochs" in given and "iterations" not in given:
        values["iterations"] = None
    return values


def merged(start: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """``start`` with the values of ``given``. The settings of a group are replaced one by one.

    Another kind of schedule keeps the settings of ``start`` that it has too, and other targets keep ``saturate``.
    """
    values = {**start, **given}
    for name in GROUPS:
        before, changes = start.get(name), given.get(name)
        if isinstance(before, Mapping) and isinstance(changes, Mapping):
            values[name] = {**before, **changes}
    if start.get("targets") is not None and given.get("targets") is not None:
        before, changes = (_part(settings["targets"], "per_cent") for settings in (start, given))
        values["targets"] = {**before, **changes} if len({**before, **changes}) > 1 else given["targets"]
    if start.get("schedule") is not None and given.get("schedule") is not None:
        before, changes = (_part(settings["schedule"], "kind") for settings in (start, given))
        kind = changes.get("kind", before.get("kind", ByLength.kind))
        known = [field.name for field in fields(SCHEDULES[kind])] if kind in SCHEDULES else []
        shared = {key: value for key, value in before.items() if key in known}
        values["schedule"] = {"kind": kind, **shared, **changes} if shared or len(changes) > 1 else kind
    return values


def _part(value: Any, name: str) -> Mapping[str, Any]:
    """A value that is written as a mapping, or as one of its fields alone."""
    return value if isinstance(value, Mapping) else {name: value}
