"""Settings that override others: those of a recipe, then a file's or the command line's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from fractrain_fx.config.plain import GROUPS
from fractrain_fx.config.schedule import SCHEDULES, ByLength
from fractrain_fx.errors import ConfigError
from fractrain_fx.training.data import IMAGES, TEXTS
from fractrain_fx.zoo.recipes import read_recipe

if TYPE_CHECKING:
    from fractrain_fx.training.settings import RunSettings

__all__ = ["from_recipe", "merged", "overridden", "refuse_unread"]

# Settings that change nothing under some values of another one.
_UNREAD: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    ("method", ("float", "static", "pfq"), ("gate_lr", "gate_lr_factor")),
    ("method", ("float",), ("format", "pins", "attention")),
    ("lr_schedule", ("cosine", "inverse-sqrt", "constant"), ("milestones", "lr_decay")),
    ("optimizer", ("sgd",), ("betas", "eps")),
    ("data", TEXTS, ("image_size",)),
    ("data", IMAGES, ("block_length",)),
]


def from_recipe(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """``values`` over the settings of the recipe that they name; as they are if they name none.

    Raises:
        ConfigError: the recipe is unknown.
    """
    name = values.get("recipe")
    return values if name is None else overridden(read_recipe(name)["settings"], values)


def refuse_unread(settings: RunSettings) -> None:
    """Raise a ``ConfigError`` for a setting that would change nothing, and is neither a default nor the recipe's."""
    values = _flat(settings)
    values["optimizer"] = settings.train.optimizer_for("classification" if settings.data in IMAGES else "language")
    for kind, chosen, names in _UNREAD:
        given = [name for name in names if values[kind] in chosen and values[name] != _usual(settings, name)]
        if given and settings.recipe is not None:
            start = _flat(type(settings).from_dict(read_recipe(settings.recipe)["settings"]))
            given = [name for name in given if values[name] != start[name]]
        if given:
            shown = ", ".join(f"{name}={settings.to_dict()[name]!r}" for name in given)
            raise ConfigError(f"{shown} changes nothing for {kind} {values[kind]!r}: leave it out")


def _flat(settings: RunSettings) -> dict[str, Any]:
    """The settings of a run by name, without its parts."""
    return {**vars(settings), **vars(settings.frac), **vars(settings.train)}


def _usual(settings: RunSettings, name: str) -> Any:
    """The default of a setting."""
    parts = (type(settings), type(settings.train), type(settings.frac))
    (field,) = (field for part in parts for field in fields(part) if field.name == name)
    return field.default if field.default_factory is MISSING else field.default_factory()


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
        known = [field.name for field in fields(SCHEDULES[kind])] if kind in list(SCHEDULES) else []
        shared = {key: value for key, value in before.items() if key in known}
        values["schedule"] = {"kind": kind, **shared, **changes} if shared or changes.keys() - {"kind"} else kind
    return values


def _part(value: Any, name: str) -> Mapping[str, Any]:
    """A value that is written as a mapping, or as one of its fields alone."""
    return value if isinstance(value, Mapping) else {name: value}
