"""Read the recipe files: one for each run in the paper's tables."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from fractrain_fx.config import paper_values
from fractrain_fx.errors import ConfigError, near
from fractrain_fx.zoo.recipes.variants import split_name, varied

# The recipes steer by a multiplier, as their measured runs did; those as the paper take its sign (``variants.py``).
_CONTROL = {"control": "multiplier"}

__all__ = ["read_recipe", "recipe_names"]


def recipe_names() -> list[str]:
    """The names of all recipes, in order."""
    found = (file.name for file in files(__package__).iterdir())
    return sorted(name.removesuffix(".yaml") for name in found if name.endswith(".yaml"))


def read_recipe(name: str) -> dict[str, Any]:
    """The entries of a recipe's file; ``settings`` are those of the variant that the name ends with.

    Args:
        name: of the recipe; it may end with ``-as-the-paper`` or ``-as-the-code``.

    Raises:
        ConfigError: the name is unknown (the message has near names), or the recipe has no such variant.
    """
    import yaml

    of_file, variant = split_name(str(name))
    file = files(__package__) / f"{of_file}.yaml"
    if not file.is_file():
        offer = near(str(name), recipe_names())
        raise ConfigError(f"recipe {name!r} is unknown.{offer} 'fractrain zoo list' names them all")
    entries: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    settings = entries["settings"]
    paper = dict(paper_values(settings["method"]))
    if "gate" in paper:
        paper["gate"] = paper["gate"] | _CONTROL | settings.get("gate", {})
        settings.pop("gate", None)
    entries["settings"] = paper | settings
    if variant:
        entries["settings"] = varied(of_file, entries["settings"], variant)
    return entries
