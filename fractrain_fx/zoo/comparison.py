"""A recipe's numbers side by side: the paper's, computed ones, and those of measured runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fractrain_fx.errors import RunError
from fractrain_fx.training.log.records import RESULT, SETTINGS
from fractrain_fx.training.log.results import RunResult
from fractrain_fx.training.settings import RunSettings
from fractrain_fx.zoo.expected import Expected, expected
from fractrain_fx.zoo.recipe import PaperRecipe, load_recipe, recipes_of

__all__ = ["PaperComparison", "RecipeResult", "compare", "read_run"]


@dataclass(frozen=True)
class RecipeResult:
    """The result of a run of a recipe. Costs are those of the ops that the method steers.

    Attributes:
        folder: folder of the run.
        epochs: epochs trained; ``best_epoch`` has the best measure.
        measure: the best accuracy in per cent, or perplexity.
        macs, seconds, joules: until the best evaluation; ``end_...`` until the end of the run.
    """

    folder: str
    epochs: int
    best_epoch: int
    measure: float
    macs: float
    seconds: float
    joules: float
    end_macs: float
    end_seconds: float
    end_joules: float


@dataclass(frozen=True)
class PaperComparison:
    """One row of a table.

    Attributes:
        recipe: the run.
        baseline: the row that the paper compares it with.
        runs: runs of this recipe.
    """

    recipe: PaperRecipe
    baseline: PaperComparison | None = None
    runs: tuple[RecipeResult, ...] = ()

    @cached_property
    def expected(self) -> Expected:
        """Costs computed from the settings."""
        return expected(self.recipe.settings)

    @property
    def samples(self) -> float | None:
        """Training samples that the paper's printed MACs pay for."""
        macs = self.recipe.paper.macs
        return None if macs is None else self.expected.samples_of(macs)

    @property
    def part(self) -> float | None:
        """``samples`` as a share of the whole run."""
        return None if self.samples is None else self.samples / self.expected.samples

    @property
    def energy_kj(self) -> float | None:
        """Computed energy of the samples that the paper's MACs pay for."""
        return None if self.samples is None else self.expected.joules * self.samples / 1e3

    @property
    def latency_min(self) -> float | None:
        """Computed latency of the samples that the paper's MACs pay for."""
        return None if self.samples is None else self.expected.seconds * self.samples / 60

    @property
    def saving(self) -> float | None:
        """Computed saving over whole runs, in per cent of the baseline's MACs."""
        return None if self.baseline is None else 100 * (1 - self.expected.macs / self.baseline.expected.macs)

    @property
    def printed_saving(self) -> float | None:
        """The saving that the paper prints, or that follows from its printed MACs."""
        paper, base = self.recipe.paper, self.baseline
        if paper.saving is not None or base is None or paper.macs is None or base.recipe.paper.macs is None:
            return paper.saving
        return 100 * (1 - paper.macs / base.recipe.paper.macs)

    def ratios(self, name: str) -> tuple[float, float] | None:
        """The paper's and the computed ratio to the baseline; ``name`` is ``energy_kj`` or ``latency_min``."""
        if self.baseline is None:
            return None
        paper, base = getattr(self.recipe.paper, name), getattr(self.baseline.recipe.paper, name)
        ours, base_ours = getattr(self, name), getattr(self.baseline, name)
        return None if None in (paper, base, ours, base_ours) else (paper / base, ours / base_ours)

    def to_dict(self) -> dict[str, Any]:
        """Plain values: the recipe with computed and measured numbers."""
        computed = {
            **asdict(self.expected),
            "macs": self.expected.macs,
            "part_of_run": self.part,
            "energy_kj": self.energy_kj,
            "latency_min": self.latency_min,
            "saving": self.saving,
            "energy_ratio": self.ratios("energy_kj"),
            "latency_ratio": self.ratios("latency_min"),
        }
        return self.recipe.to_dict() | {"computed": computed, "measured": [asdict(run) for run in self.runs]}


def compare(table: str, runs: Iterable[Path] = ()) -> list[PaperComparison]:
    """The rows of a table, with the runs that belong to them.

    Raises:
        ConfigError: the table is unknown.
        RunError: a folder has no finished run of a recipe.
    """
    measured: dict[str, list[RecipeResult]] = {}
    for folder in runs:
        name, run = read_run(folder)
        measured.setdefault(name, []).append(run)
    comparisons: dict[str, PaperComparison] = {}

    def row(recipe: PaperRecipe) -> PaperComparison:
        if recipe.name not in comparisons:
            base = None if recipe.baseline is None else row(load_recipe(recipe.baseline))
            comparisons[recipe.name] = PaperComparison(recipe, base, tuple(measured.get(recipe.name, ())))
        return comparisons[recipe.name]

    return [row(recipe) for recipe in recipes_of(table)]


def read_run(folder: Path) -> tuple[str, RecipeResult]:
    """The name of the recipe of a run, and its result.

    Raises:
        RunError: the folder has no finished run, or the run has no recipe.
    """
    try:
        settings = RunSettings.from_yaml(folder / SETTINGS)
    except (OSError, ValueError) as error:
        raise RunError(f"{folder} holds no finished run of fractrain train: {error}") from error
    result = RunResult.from_json(folder / RESULT)
    if settings.recipe is None:
        raise RunError(f"the run in {folder} follows no recipe: start it with fractrain train --recipe NAME")
    best, end = (result.hardware[until]["steered"] for until in ("best", "end"))
    run = RecipeResult(
        folder=str(folder),
        epochs=result.epochs,
        best_epoch=result.best_epoch,
        measure=result.best,
        **{key: best[key] for key in ("macs", "seconds", "joules")},
        **{f"end_{key}": end[key] for key in ("macs", "seconds", "joules")},
    )
    return settings.recipe, run
