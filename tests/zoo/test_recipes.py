"""Every row of the paper's tables is a recipe that runs, with the paper's numbers."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from itertools import combinations

import pytest
import yaml

from fractrain_fx.config.targets import CostReach, resolve_targets
from fractrain_fx.engine.cost_term import authors_beta
from fractrain_fx.errors import ConfigError
from fractrain_fx.zoo.recipe import TABLES, PaperRecipe, load_recipe, load_recipes, recipes_of

RECIPES = load_recipes()

# Rows that the paper prints, by table; table 1 prints PFQ's alone and what SBM has follows from them.
ROWS = {"1": 12, "2": 4, "3": 20, "4": 4, "5": 8, "supplement-1": 8, "figure-1": 1, "figure-3": 3, "figure-5": 13}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipe_is_a_whole_run(recipe: PaperRecipe) -> None:
    settings = recipe.settings
    assert settings.recipe == recipe.name and set(recipe.tables) <= set(TABLES)
    assert settings.frac.method in ("static", "pfq", "dfq", "fractrain", "slu")
    assert recipe.baseline is None or load_recipe(recipe.baseline).values["data"] == recipe.values["data"]
    if settings.data.startswith("cifar"):  # supplement 4
        loop = settings.train
        assert (loop.iterations, loop.batch_size, loop.lr, loop.weight_decay) == (64_000, 128, 0.1, 1e-4)
        assert (loop.optimizer, loop.lr_schedule, loop.milestones) == ("sgd", "steps", (0.5, 0.75))
    if settings.data == "imagenet":
        assert (settings.train.epochs, settings.train.batch_size, settings.image_size) == (90, 256, 224)
        assert [round(90 * share, 3) for share in settings.train.milestones] == [30, 60]
    if settings.model == "zoo:mobilenetv2":
        assert [(pin.pattern, str(pin.precision)) for pin in settings.frac.pins] == [("depthwise", "FW-8/BW-16")]
    assert "settings" in recipe.to_dict()


def test_parts_that_recipes_merge_share_no_setting() -> None:
    """Versions of PyYAML differ in which of two merged parts wins."""
    read = yaml.safe_load((files("fractrain_fx.zoo") / "recipes.yaml").read_text(encoding="utf-8"))
    settings = [set().union(*read[kind].values()) for kind in ("loops", "models", "methods")]
    assert all(settings) and not any(one & other for one, other in combinations(settings, 2))


@pytest.mark.parametrize(("table", "count"), ROWS.items())
def test_every_row_has_a_recipe(table: str, count: int) -> None:
    assert len(recipes_of(table)) == count


def test_the_rows_of_figure_6_are_those_of_table_3_on_cifar_10() -> None:
    names = {recipe.name for recipe in recipes_of("figure-6")}
    assert names == {recipe.name for recipe in recipes_of("3") if recipe.values["data"] == "cifar10"}


def test_a_table_shows_the_methods_of_a_model_in_the_papers_order() -> None:
    rows = [recipe.row.partition(", ")[2] for recipe in recipes_of("3")[:5]]
    assert [row.split(",")[0] for row in rows] == ["WAGEUBN", "DoReFa", "SBM", "DFQ", "FracTrain"]


def test_the_papers_savings_follow_from_its_macs() -> None:
    checked = 0
    for recipe in RECIPES:
        paper = recipe.paper
        if recipe.baseline and None not in (paper.saving, paper.macs):
            base = load_recipe(recipe.baseline).paper.macs
            assert base is not None and paper.macs is not None
            # The table prints MACs with three digits.
            assert 100 * (1 - paper.macs / base) == pytest.approx(paper.saving, abs=0.6)
            checked += 1
    assert checked == 10


def test_adaptation_and_fine_tuning_are_settings() -> None:
    assert {recipe.settings.setting for recipe in recipes_of("5")} == {"adaptation", "fine-tuning"}


def test_the_ablation_has_three_ways_to_move_on() -> None:
    assert {recipe.settings.frac.schedule.kind for recipe in recipes_of("ablation")} == {"manual", "two-stage", "auto"}


def test_unknown_names_are_answered_with_near_ones() -> None:
    with pytest.raises(ConfigError, match="table3-resnet38-cifar10-sbm"):
        load_recipe("table3-resnet38-cifar10-sbn")
    with pytest.raises(ConfigError, match="supplement-1"):
        recipes_of("supplement1")


def test_targets_of_resnets_lie_within_what_their_options_reach() -> None:
    """Blocks can all be skipped, so everything from nearly 0 to the dearest option's cost."""
    for recipe in RECIPES:
        config = recipe.settings.frac
        if config.gated and "resnet" in recipe.settings.model:
            dearest = max(
                option.fw * config.gate_weight_bits + option.bw * config.gate_weight_bits + option.fw * option.bw
                for option in config.gate_options
            )
            reach = CostReach((0.1, 100 * dearest / 3072), 100, 100, dict.fromkeys(config.precision_stages, 0.0))
            assert resolve_targets(config, reach) == tuple(
                config.targets.per_cent if config.method == "fractrain" else config.targets.per_cent[-1:]  # type: ignore[union-attr]
            )


GATED = [recipe.name for recipe in RECIPES if recipe.values["method"] in ("dfq", "fractrain", "slu")]


@pytest.mark.parametrize("name", GATED)
def test_a_gated_run_is_there_as_the_paper_and_as_the_code_have_it(name: str) -> None:
    plain, paper, code = (load_recipe(name + variant).settings for variant in ("", "-as-the-paper", "-as-the-code"))
    assert paper.frac.gate.control == code.frac.gate.control == "sign" and paper.recipe == f"{name}-as-the-paper"
    assert paper.frac.options == plain.frac.options and paper.frac.gate.beta == 1e-3
    assert code.frac.gate.beta == authors_beta(code.frac.gate_options, code.frac.gate_weight_bits)
    assert {each.train.gate_lr for each in (plain, paper, code)} == {"model"}
    assert plain.frac.targets is not None and code.frac.targets == replace(plain.frac.targets, saturate=True)
    if plain.data == "imagenet":
        assert [str(each) for each in code.frac.options or ()][-1] == "FW-8/BW-16"
        assert code.frac.pins[-1].pattern == "*.downsample.*"


def test_a_run_without_gates_has_no_such_variant() -> None:
    with pytest.raises(ConfigError, match="has no gates"):
        load_recipe("table3-resnet38-cifar10-sbm-as-the-code")
    with pytest.raises(ConfigError, match="Did you mean"):
        load_recipe("table3-resnet38-cifar10-fractrian-as-the-code")
