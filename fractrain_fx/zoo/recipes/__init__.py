"""One file for every row of the paper's tables: how to run it, and what the paper got."""

from fractrain_fx.zoo.recipes.recipe import TABLES, PaperNumbers, Recipe, load_recipe, load_recipes, recipes_of

__all__ = ["TABLES", "PaperNumbers", "Recipe", "load_recipe", "load_recipes", "recipes_of"]
