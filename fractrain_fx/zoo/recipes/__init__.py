"""One file for every row of the paper's tables: its settings, and the paper's numbers."""

from fractrain_fx.zoo.recipes.files import read_recipe, recipe_names

__all__ = ["read_recipe", "recipe_names"]
