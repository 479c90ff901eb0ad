"""Kernels for ``backend="auto"``: built for a long run, not for a short one, and a run keeps what it began with."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from fractrain_fx.config import FracConfig, RunConfig
from fractrain_fx.errors import ConfigError, RunError
from fractrain_fx.native import choice
from fractrain_fx.native.choice import MEANING
from fractrain_fx.training import RunSettings, Trainer, TrainSettings, build_trainer, building, new_run, resume_run
from fractrain_fx.training.building import float_seconds, prepare_rounding
from fractrain_fx.training.objective import check_outputs
from fractrain_fx.training.run import build

TINY = Path(__file__).with_name("tiny.py")


class Compiler:
    """Stands for the compiler: counts the builds, and fails if there is a reason."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.builds, self.reason = 0, ""
        monkeypatch.delenv(MEANING)
        monkeypatch.setattr(choice, "is_built", lambda: self.builds > 0)
        monkeypatch.setattr(choice, "lacking_programs", lambda: [])
        monkeypatch.setattr(choice, "has_triton_package", lambda: False)
        monkeypatch.setattr(building, "kernels", self.kernels)

    def kernels(self) -> None:
        if self.reason:
            raise ConfigError(self.reason)
        self.builds += 1


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return Compiler(monkeypatch)


def settings(method: str = "pfq", **loop: object) -> RunSettings:
    train = TrainSettings(**{"epochs": 1, "batch_size": 32, "device": "cpu"} | loop)  # type: ignore[arg-type]
    return RunSettings(f"{TINY}:net", image_size=8, subset=64, train=train, frac=FracConfig(method=method))  # type: ignore[arg-type]


def told(run: RunSettings, **words: Path) -> tuple[Trainer, str]:
    stream = io.StringIO()
    trainer = build_trainer(run, console=Console(file=stream, width=300), **words)  # type: ignore[arg-type]
    if run.train.epochs == 1:
        trainer.fit()
    return trainer, stream.getvalue()


@pytest.mark.long
def test_kernels_are_built_for_a_long_run_and_not_for_a_short_one(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "REPORTED", set())
    trainer, words = told(settings())
    assert not [each for each in caplog.messages if each.startswith("rounds by")]  # the run says it
    assert trainer.model.frac_config.run.backend == "plain" and compiler.builds == 0
    assert "rounds by plain torch operations (run.backend='auto': C++ kernels are quicker, and not built yet" in words
    trainer, words = told(settings(epochs=10_000_000))
    assert trainer.model.frac_config.run.backend == "cpu" and compiler.builds == 1
    assert "building C++ kernels, once, because this run would take roughly" in words
    assert told(settings())[0].model.frac_config.run.backend == "cpu" and compiler.builds == 1


def test_a_run_on_a_gpu_rounds_by_triton_where_it_is_installed_and_says_so(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = settings(device="auto", epochs=10_000_000)
    built = build(run)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    for there, used, words in ((True, "cuda", "rounds by Triton kernels"), (False, "plain", "by plain torch")):
        monkeypatch.setattr(choice, "has_triton_package", lambda there=there: there)
        stream = io.StringIO()
        assert prepare_rounding(run, built, Console(file=stream, width=300)).run.backend == used
        assert words in stream.getvalue() and compiler.builds == 0


def test_the_time_of_a_run_is_computed_from_its_macs(monkeypatch: pytest.MonkeyPatch) -> None:
    run = settings(epochs=3)
    built = build(run)
    frozen = next(built.model.children()).eval()
    # 64 pixels: 3 x 3 x 3 x 8 of the stem, 3 x 3 x 8 x 8 and 8 x 8 of the block; and the head. Three products each.
    macs = 64 * (216 + 576 + 64) + 80
    one_thread = 3 * 3 * 64 * macs / 2e10
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert float_seconds(run, built) == pytest.approx(one_thread)
    check_outputs("own.py:model", built)
    assert built.model.training and not frozen.training
    assert float_seconds(replace(run, train=replace(run.train, iterations=2)), built) == pytest.approx(one_thread / 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert float_seconds(run, built) == pytest.approx(one_thread / 8)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert float_seconds(run, built) == pytest.approx(one_thread / 16)


def test_a_build_that_fails_is_told_and_the_run_is_eager(compiler: Compiler) -> None:
    compiler.reason = "no room on the disk"
    trainer, words = told(settings(epochs=10_000_000))
    assert trainer.model.frac_config.run.backend == "plain" and "not built: no room on the disk" in words


def test_a_resumed_run_rounds_as_before_though_kernels_were_built_meanwhile(compiler: Compiler, tmp_path: Path) -> None:
    quiet = Console(quiet=True)
    trainer = new_run(settings(), tmp_path, quiet)
    assert RunSettings.from_yaml(tmp_path / "config.yaml").frac.run.backend == "plain"
    trainer.fit()
    compiler.builds = 1
    assert resume_run(tmp_path, quiet).model.frac_config.run.backend == "plain"


def test_a_trainer_refuses_a_checkpoint_that_was_rounded_otherwise(compiler: Compiler, tmp_path: Path) -> None:
    trainers = []
    for compiler.builds in (0, 1):
        made = build_trainer(settings(), console=Console(quiet=True))
        trainers.append(Trainer(made.model, made.data, made.settings, out=tmp_path, console=Console(quiet=True)))
    trainers[0].fit()
    words = r"configuration: run.backend was 'plain' and is 'cpu'\. Put it back"
    with pytest.raises(RunError, match=words):
        trainers[1].resume()


def test_a_float_run_and_explicit_words_build_nothing(compiler: Compiler) -> None:
    run = settings(epochs=10_000_000)
    for frac in (FracConfig(method="float"), FracConfig(method="pfq", run=RunConfig(backend="plain"))):
        trainer, words = told(replace(run, frac=frac))
        assert trainer.model.frac_config.run.backend == "plain" and not words
    assert compiler.builds == 0
