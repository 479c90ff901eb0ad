"""Recipes: the settings of the paper's runs, with the numbers that the paper prints for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from fractrain_fx.config.schedule import parse_schedule
from fractrain_fx.errors import ConfigError, near
from fractrain_fx.training.settings import RunSettings
from fractrain_fx.zoo.recipes import read_recipe, recipe_names

__all__ = ["TABLES", "PaperNumbers", "PaperRecipe", "load_recipe", "load_recipes", "recipes_of"]

# The keys that a recipe's ``tables`` may name, with descriptions.
TABLES = {
    "1": "PFQ on MobileNetV2 and CIFAR-10/100",
    "2": "PFQ on ResNet-18 / ImageNet and Transformer-base / WikiText-103",
    "3": "FracTrain and DFQ against SBM, WAGEUBN and DoReFa on ResNet-38/74 and CIFAR-10/100",
    "4": "FracTrain against SBM on ImageNet",
    "5": "adaptation and fine-tuning of ResNet-38 on CIFAR-100",
    "supplement-1": "FracTrain on ResNet-110/164 and CIFAR-10/100",
    "figure-1": "the example of PFQ",
    "figure-3": "PFQ against SBM: the points stated in sections 3.1 and 4.2",
    "figure-5": "DFQ over its range of cp, and SLU (section 4.3, supplement 6)",
    "figure-6": "training trajectories: runs of table 3",
    "ablation": "manual, two-stage and four-stage PFQ (supplement 1)",
}


# The order of methods in the rows of one model, as in the paper.
_ORDER = ("wageubn", "dorefa", "affine", "pfq", "slu", "dfq", "fractrain")


@dataclass(frozen=True)
class PaperNumbers:
    """The numbers that the paper prints for a run; ``None`` for numbers that it does not print.

    Attributes:
        accuracy: best test accuracy in per cent.
        perplexity: best test perplexity.
        delta: difference of the measure to the baseline's, as the paper prints it.
        macs: training cost until the best evaluation, in full-precision MACs.
        saving: saving in per cent of the baseline's MACs.
        energy_kj: training energy in kilojoules.
        latency_min: training latency in minutes.
        cost_of_dfq: MACs as a multiple of DFQ's.
        delta_range, saving_range: lowest and highest over a group of runs, if only these are printed.
    """

    accuracy: float | None = None
    perplexity: float | None = None
    delta: float | None = None
    macs: float | None = None
    saving: float | None = None
    energy_kj: float | None = None
    latency_min: float | None = None
    cost_of_dfq: float | None = None
    delta_range: tuple[float, float] | None = None
    saving_range: tuple[float, float] | None = None

    @property
    def measure(self) -> float | None:
        """Accuracy or perplexity, whichever is printed."""
        return self.perplexity if self.accuracy is None else self.accuracy


@dataclass(frozen=True)
class PaperRecipe:
    """A run of the paper.

    Attributes:
        name: its name in ``recipes.yaml``.
        tables: its tables and figures, keys of ``TABLES``.
        row: its name in the paper.
        paper: the paper's numbers.
        baseline: name of the recipe that the paper compares it with.
        note: a remark on the numbers.
        values: its settings in that file.
    """

    name: str
    tables: tuple[str, ...]
    row: str
    paper: PaperNumbers
    values: Mapping[str, Any]
    baseline: str | None = None
    note: str | None = None

    @cached_property
    def settings(self) -> RunSettings:
        """All settings of the run, as ``fractrain train --recipe`` starts it."""
        return replace(RunSettings.from_dict(self.values), recipe=self.name)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with every setting."""
        printed = {f.name: getattr(self.paper, f.name) for f in fields(self.paper)}
        return {
            "name": self.name,
            "tables": list(self.tables),
            "row": self.row,
            "baseline": self.baseline,
            "note": self.note,
            "paper": {key: value for key, value in printed.items() if value is not None},
            "settings": self.settings.to_dict(),
        }


def load_recipe(name: str) -> PaperRecipe:
    """Load a recipe by name, which may end with ``-as-the-paper`` or ``-as-the-code``.

    Raises:
        ConfigError: the name is unknown (the message has near names), or the recipe has no such variant.
    """
    entries = read_recipe(name)
    pairs = ("delta_range", "saving_range")
    paper: dict[str, Any] = {key: tuple(value) if key in pairs else value for key, value in entries["paper"].items()}
    return PaperRecipe(
        name=name,
        tables=tuple(entries["tables"]),
        row=entries["row"],
        paper=PaperNumbers(**paper),
        values=entries["settings"],
        baseline=entries.get("baseline"),
        note=entries.get("note"),
    )


def load_recipes() -> list[PaperRecipe]:
    """All recipes, in order of their names."""
    return [load_recipe(name) for name in recipe_names()]


def recipes_of(table: str) -> list[PaperRecipe]:
    """The recipes of a table or figure: model by model, with baselines before the runs compared with them.

    Raises:
        ConfigError: the table or figure is unknown.
    """
    if table not in TABLES:
        raise ConfigError(f"table {table!r} is unknown: write one of {', '.join(TABLES)}.{near(table, TABLES)}")
    rows = [recipe for recipe in load_recipes() if table in recipe.tables]
    return sorted(rows, key=_place)


def _place(recipe: PaperRecipe) -> tuple[str, str, int, str]:
    kind = recipe.values["format"] if recipe.values["method"] == "static" else recipe.values["method"]
    schedules = ("manual", "two-stage", "auto")
    return (
        recipe.row.partition(",")[0],
        recipe.baseline or recipe.name,
        _ORDER.index(kind),
        str(schedules.index(parse_schedule(recipe.values.get("schedule", "auto")).kind)) + recipe.name,
    )
