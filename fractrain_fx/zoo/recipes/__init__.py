"""One file for every row of the paper's tables: its settings, and the paper's numbers."""

from fractrain_fx.zoo.recipes.recipe import TABLES, PaperNumbers, Recipe, load_recipe, load_recipes, recipes_of

__all__ = ["TABLES", "PaperNumbers", "Recipe", "load_recipe", "load_recipes", "recipes_of"]
