"""What ``backend="auto"`` stands for: the disk, the device and the method decide, and a model says so."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fractrain_fx import AffineConfig, FracConfig, FracModel, RunConfig, fractrainify, plan
from fractrain_fx.errors import ConfigError
from fractrain_fx.native import build, choice
from fractrain_fx.native.choice import MEANING, choose_rounding
from fractrain_fx.passes import default_passes
from tests.build import rewritten as build_rewritten

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """C++ kernels that were built before, no Triton, and nothing set."""
    monkeypatch.delenv(MEANING)
    monkeypatch.setattr(choice, "is_built", lambda: True)
    monkeypatch.setattr(choice, "has_triton_package", lambda: False)
    return monkeypatch


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))


def rewritten(**words: Any) -> FracModel:
    return build_rewritten(net(), torch.randn(2, 6), method="static", **words)


def formats_of(model: FracModel) -> list[Any]:
    return [module.fmt for module in model.modules() if hasattr(module, "fmt")]


def test_kernels_that_are_there_are_used_and_others_are_not(built: pytest.MonkeyPatch) -> None:
    assert choose_rounding(FracConfig(), CPU).used == "cpu"
    assert choose_rounding(FracConfig(method="static", format="mx"), CPU).used == "cpu"
    built.setattr(choice, "is_built", lambda: False)
    for lacking, words in (([], "run 'fractrain build' once"), (["c++", "ninja"], "no c++ and no ninja")):
        built.setattr(choice, "lacking_programs", lambda lacking=lacking: lacking)
        chosen = choose_rounding(FracConfig(), CPU)
        assert (chosen.used, chosen.hint) == ("plain", not lacking) and words in str(chosen)


@pytest.mark.parametrize(
    "words",
    [
        {"method": "float"},
        {"method": "slu"},
        {"method": "slu", "format": "mx"},
        {"affine": AffineConfig(ranges="row")},
        {"format": "dorefa"},
    ],
)
def test_where_kernels_round_nothing_there_is_nothing_to_choose(
    words: dict[str, Any], built: pytest.MonkeyPatch
) -> None:
    chosen = choose_rounding(FracConfig(**words), CPU)
    assert (chosen.used, chosen.reason) == ("plain", "")


def test_a_gpu_has_triton_kernels_where_triton_is_installed(built: pytest.MonkeyPatch) -> None:
    without = choose_rounding(FracConfig(), GPU)
    assert without.used == "plain" and "Triton is not installed" in str(without) and not without.hint
    for word, meaning in (("cuda", "plain"), ("auto", "cuda")):
        built.setenv(MEANING, meaning)
        with pytest.raises(ConfigError, match=r"run\.backend='cuda' needs Triton"):
            choose_rounding(FracConfig(run=RunConfig(backend=word)), GPU)  # type: ignore[arg-type]
    built.delenv(MEANING)
    built.setattr(choice, "has_triton_package", lambda: True)
    chosen = choose_rounding(FracConfig(), GPU)
    assert chosen.used == "cuda" and str(chosen) == "rounds by Triton kernels (run.backend='auto': it is installed)"
    blocks = choose_rounding(FracConfig(method="static", format="mx"), GPU)
    assert blocks.used == "cuda"
    assert choose_rounding(FracConfig(), torch.device("mps")).used == "plain"


def test_a_model_on_a_cpu_is_ready_for_a_gpu(built: pytest.MonkeyPatch) -> None:
    built.setattr(choice, "has_triton_package", lambda: True)
    for there, used, kernels in ((True, "cpu", ("cpu", "cuda")), (False, "cuda", ("cuda",))):
        built.setattr(choice, "is_built", lambda there=there: there)
        model = rewritten()
        assert model.frac_config.run.backend == used
        formats = formats_of(model)
        assert formats and all(each.kernels == kernels for each in formats)
        assert rewritten(format="mx").frac_config.run.backend == used
    assert not any(each.kernels for each in formats_of(rewritten(run=RunConfig(backend="plain"))))


@pytest.mark.parametrize("wrong", [{"method": "float"}, {"format": "dorefa"}, {"affine": AffineConfig(ranges="row")}])
def test_triton_where_it_rounds_nothing_is_an_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"run\.backend='cuda'"):
        FracConfig(run=RunConfig(backend="cuda"), **{"method": "static"} | wrong)


def test_a_plan_says_where_triton_changes_nothing(built: pytest.MonkeyPatch) -> None:
    built.setattr(choice, "has_triton_package", lambda: True)
    told = str(
        plan(
            net(),
            config=FracConfig(method="static", run=RunConfig(backend="cuda")),
            example_inputs=(torch.randn(4, 6),),
        )
    )
    assert "run.backend='cuda' changes nothing here: it is for GPUs, and this model is on 'cpu'" in told


@pytest.mark.parametrize("asked", ["plain", "cpu"])
def test_a_word_in_the_configuration_is_that_and_the_environment_decides_for_auto(
    asked: str, built: pytest.MonkeyPatch
) -> None:
    other = {"plain": "cpu", "cpu": "plain"}[asked]
    built.setenv(MEANING, other)
    assert choose_rounding(FracConfig(run=RunConfig(backend=asked)), CPU).used == asked  # type: ignore[arg-type]
    assert choose_rounding(FracConfig(), CPU).used == other
    built.setenv(MEANING, "fast")
    with pytest.raises(ConfigError, match="FRACTRAIN_BACKEND='fast' is unknown: write plain, cuda or cpu"):
        choose_rounding(FracConfig(), CPU)


def test_a_model_rounds_as_chosen_and_says_so(built: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fractrain_fx")
    x = torch.randn(4, 6)
    for used, noted in (("cpu", "by C++ kernels"), ("plain", "by plain torch operations")):
        built.setattr(choice, "is_built", lambda used=used: used == "cpu")
        model = rewritten()
        assert model.frac_config.run.backend == used
        assert noted in str(plan(net(), config=FracConfig(method="static"), example_inputs=(x,)))
        assert noted in caplog.messages[-1]
        formats = formats_of(model)
        assert formats and {"cpu" in each.kernels for each in formats} == {used == "cpu"}


def test_a_chain_of_ones_own_rounds_as_the_model_says(built: pytest.MonkeyPatch) -> None:
    config = FracConfig(method="static")
    model = fractrainify(
        net(), config=config, example_inputs=(torch.randn(2, 6),), passes=default_passes(config), check=False
    )
    assert model.frac_config.run.backend == "cpu"
    assert {"cpu" in each.kernels for each in formats_of(model)} == {True}


def test_nothing_is_built_for_a_model_in_a_loop_of_ones_own(
    built: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    built.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    built.setattr(choice, "is_built", build.is_built)
    built.setattr(choice, "lacking_programs", lambda: [])
    built.setattr(choice, "REPORTED", set())
    for _ in range(2):
        assert rewritten().frac_config.run.backend == "plain"
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == (0 if torch.cuda.is_available() else 1)
    assert all("run 'fractrain build' once" in words for words in warned)
    assert not list(tmp_path.iterdir())


def test_a_saved_model_keeps_auto_and_an_explicit_word(built: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for asked in ("auto", "plain"):
        model = rewritten(run=RunConfig(backend=asked))
        model.save_pretrained(tmp_path / asked)
        loaded = FracModel.from_pretrained(tmp_path / asked, model=net())
        assert (
            loaded.frac_config.run.backend == model.frac_config.run.backend == {"auto": "cpu", "plain": "plain"}[asked]
        )
    built.setattr(choice, "is_built", lambda: False)  # another machine
    elsewhere = FracModel.from_pretrained(tmp_path / "auto", model=net())
    assert elsewhere.frac_config.run.backend == "plain"
    x = torch.randn(4, 6)
    elsewhere.train()(x)


def test_triton_is_looked_for_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("fractrain_fx.native.choice.find_spec", asked.append)
    assert not choice.has_triton_package.__wrapped__()
    assert asked == ["triton"]
