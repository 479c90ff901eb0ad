"""``fractrain zoo`` and ``fractrain train --recipe`` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fractrain_fx.cli import main
from fractrain_fx.config import RECIPES
from fractrain_fx.config.recipes import recipe_of
from fractrain_fx.training.settings import RunSettings
from fractrain_fx.zoo.formats import FORMAT_RECIPES

TINY = Path(__file__).parents[1] / "training" / "tiny.py"
RECIPE = "table3-resnet38-cifar10-sbm"
# The paper's run on other data and a small model, so that a test can afford it.
SMALL = ["--data", "digits", "--model", f"{TINY}:net", "--image-size", "8", "--subset", "64", "--batch-size", "32"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "sbm"
    assert main(["train", "--recipe", RECIPE, *SMALL, "--epochs", "2", "--device", "cpu", "--out", str(out)]) == 0
    return out


def test_a_recipe_is_trained_and_flags_win(run: Path) -> None:
    settings = RunSettings.from_yaml(run / "config.yaml")
    assert settings.recipe == RECIPE and settings.data == "digits"
    assert (settings.train.lr_schedule, settings.train.optimizer, settings.frac.method) == ("steps", "sgd", "static")
    assert (settings.train.epochs, settings.train.iterations) == (2, None)  # the recipe's 64,000 would win


def test_a_run_ends_with_its_cost_to_the_end_and_to_the_best_evaluation(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    end, best = result["hardware"]["end"], result["hardware"]["best"]
    assert end["samples"] == 128 and best["samples"] == 64 * result["best_epoch"]
    assert best["total"]["joules"] == pytest.approx(end["total"]["joules"] * best["samples"] / 128)
    assert set(end["by_path"]) == {"FW", "EB", "GC"} and list(end["by_stage"]) == ["1: FW-8/BW-8"]
    assert {"stem", "block.0", "block.3", "head"} == set(end["by_op"])
    assert end["steered"]["macs"] == pytest.approx(end["by_op"]["block.0"]["macs"] + end["by_op"]["block.3"]["macs"])


def test_a_table_has_the_papers_computed_and_measured_numbers(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zoo", "table", "3", "--runs", str(run), "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert len(rows) == 20
    row = rows[RECIPE]
    assert row["paper"] == {"accuracy": 92.66, "macs": 1.18e14, "energy_kj": 33.55, "latency_min": 310.47}
    assert row["computed"]["macs"] == pytest.approx(1.279e14, rel=1e-3)
    assert row["computed"]["part_of_run"] == pytest.approx(0.922, abs=0.001)
    (measured,) = row["measured"]
    assert measured["epochs"] == 2 and measured["folder"] == str(run) and measured["joules"] > 0
    dfq = rows["table3-resnet38-cifar10-dfq"]["computed"]
    assert dfq["energy_ratio"][0] == pytest.approx(23.97 / 33.55) and dfq["saving"] == pytest.approx(52, abs=0.1)

    assert main(["zoo", "table", "figure-6", "--runs", str(run)]) == 0
    printed = capsys.readouterr().out
    assert "33.55 / 18.31" in printed and f"measured: {run.name}" in printed and "compare ratios" in printed


def test_a_table_is_renewed_in_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n\n<!-- table figure-1 -->\nold\n<!-- end -->\n\nafter\n")
    assert main(["zoo", "table", "figure-1", "--into", str(page)]) == 0
    text = page.read_text()
    assert "old" not in text and text.startswith("before") and text.endswith("after\n") and "63.2 / 43.6 %" in text
    assert main(["zoo", "table", "3", "--into", str(page)]) == 2
    assert "<!-- table 3 -->" in capsys.readouterr().err


def test_the_tables_of_the_documentation_are_what_the_command_writes(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "measured" / "paper.md").read_text()
    page = tmp_path / "paper.md"
    page.write_text(text)
    for table in ("3", "5"):
        assert main(["zoo", "table", table, "--into", str(page)]) == 0
    assert page.read_text() == text


def test_the_list_names_models_tables_and_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zoo", "list"]) == 0
    printed = capsys.readouterr().out
    assert "zoo:resnet38" in printed and "supplement-1" in printed and RECIPE in printed
    assert main(["zoo", "list", "--json"]) == 0
    assert RECIPE in json.loads(capsys.readouterr().out)["recipes"]


def test_a_shown_recipe_is_a_whole_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zoo", "show", RECIPE, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert RunSettings.from_dict(shown["settings"]).recipe == RECIPE
    assert main(["zoo", "show", RECIPE]) == 0
    assert "iterations: 64000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (["zoo", "show"], "needs a name"),
        (["zoo", "show", "table3"], "zoo list"),
        (["zoo", "table", "6"], "supplement-1"),
        (["zoo", "table", "figure-1", "--runs", "nowhere"], "no finished run"),
        (["train", "--recipe", "table3-resnet38-cifar10"], "table3-resnet38-cifar10-"),
        (["train", "--recipe", RECIPE, "--config", "run.yaml"], "leave one out"),
    ],
)
def test_what_is_not_there_is_answered(call: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(call) == 2
    assert message in capsys.readouterr().err


def test_a_run_of_no_recipe_belongs_to_no_table(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("result.json", "config.yaml"):
        (tmp_path / name).write_text((run / name).read_text().replace(f"recipe: {RECIPE}", "recipe: null"))
    assert main(["zoo", "table", "figure-1", "--runs", str(tmp_path)]) == 2
    assert "follows no recipe" in capsys.readouterr().err


def test_the_edge_experiment_is_a_table_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- table edge -->\n<!-- end -->\n")
    assert main(["zoo", "table", "edge", "--into", str(page)]) == 0
    assert "| ResNet-38 | 34.9 | 35.0 |" in page.read_text()
    assert main(["zoo", "table", "edge", "--runs", str(tmp_path)]) == 2
    assert "leave out --runs" in capsys.readouterr().err


def test_recipes_of_number_formats_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zoo", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["formats"]
    assert listed.keys() == RECIPES.keys()
    # Of 32 x 32 bits: 8 x 8 twice and 16 x 16 once, and 4 x 4 three times.
    assert listed["switchback"]["cp"] == 12.5 and listed["mxfp4"]["cp"] == 1.5625
    assert listed["mxfp8-nvfp4"]["cp"] == pytest.approx(100 * (64 + 16 + 16) / 3 / 1024)
    assert listed["nvfp4"]["scales"] == "8 bits for 16 values" and "2304.13013" in listed["switchback"]["source"]
    assert "scaled by 3/4" in listed["mxfp4"]["differs"]  # without which stochastic rounding saturates
    for name, shown in listed.items():
        assert RECIPES[name] == recipe_of(shown["recipe"]) == FORMAT_RECIPES[name].config.product_recipe
    assert main(["zoo", "show", "switchback"]) == 0
    assert "bfloat16: true" in capsys.readouterr().out
