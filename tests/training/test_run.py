"""The paper's settings: one call pre-trains in float on one part and trains on the other, and goes on after a stop."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from fractrain_fx.config import FracConfig
from fractrain_fx.errors import ConfigError, DataError, ModelError, RunError, TargetError
from fractrain_fx.training import RunSettings, TrainSettings, build_trainer, new_run, resume_run
from fractrain_fx.training.folder.checkpoint import save_checkpoint
from fractrain_fx.training.run import build, hold_folder, trained_model
from tests.training.runs import TINY, quiet, weights


def settings(setting: str, **changes: object) -> RunSettings:
    loop = TrainSettings(epochs=2, batch_size=32, lr=0.05, device="cpu")
    run = RunSettings(f"{TINY}:net", image_size=8, subset=200, setting=setting, train=loop, frac=FracConfig())  # type: ignore[arg-type]
    return replace(run, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("setting", "classes"), [("adaptation", 5), ("fine-tuning", 10)])
def test_a_model_is_pre_trained_in_float_and_goes_on_with_its_weights(
    setting: str, classes: int, tmp_path: Path
) -> None:
    run = settings(setting, pretrain_epochs=3)
    trainer = new_run(run, tmp_path, quiet())
    first = json.loads((tmp_path / "pretrain" / "result.json").read_text())
    assert first["epochs"] == 3 and first["mean_cp_total"] == 1
    assert trainer.data.classes == classes == trainer.model.head.out_features
    assert len(trainer.data.train) == 100
    checkpoint = load_file(tmp_path / "pretrain" / "checkpoint-0003" / "model.safetensors")
    now = weights(trainer)
    assert all(torch.equal(now[name], value) for name, value in checkpoint.items() if not name.startswith("frac."))
    result = trainer.fit()
    assert result.epochs == 2 and result.mean_cp_total < 0.5
    assert {"pretrain", "result.json", "metrics.jsonl"} <= {path.name for path in tmp_path.iterdir()}


def test_without_a_folder_both_phases_run_too() -> None:
    assert build_trainer(settings("fine-tuning"), console=quiet()).fit().epochs == 2


@pytest.mark.parametrize(
    ("setting", "gates"), [("adaptation", {"gate_lr": "peak"}), ("fine-tuning", {"gate_lr_factor": 0.5})]
)
def test_settings_of_gates_are_for_the_second_phase(setting: str, gates: dict[str, Any]) -> None:
    run = settings(setting, pretrain_epochs=1)
    run = replace(run, train=replace(run.train, epochs=1, **gates))
    trainer = build_trainer(run, console=quiet())
    assert gates.items() <= vars(trainer.settings).items() and trainer.model.frac_config.gated


@pytest.mark.long
def test_a_stop_in_either_phase_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = settings("fine-tuning", pretrain_epochs=2)
    whole = new_run(run, tmp_path / "whole", quiet())
    whole.fit()

    saves = 0

    def stopping(*held: Any) -> None:
        nonlocal saves
        saves += 1
        if saves in (2, 4):  # in the first phase; between the two
            raise KeyboardInterrupt
        save_checkpoint(*held)

    out = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        patch.setattr("fractrain_fx.training.trainer.save_checkpoint", stopping)
        with pytest.raises(KeyboardInterrupt):
            new_run(run, out, quiet())
        with pytest.raises(RunError, match="--resume"):
            new_run(run, out, quiet())
        with pytest.raises(KeyboardInterrupt):
            resume_run(out, quiet()).fit()
    resumed = resume_run(out, quiet())
    resumed.fit()
    ours, theirs = weights(resumed), weights(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"setting": "adaption"}, "adaptation"),
        ({"setting": "standard", "pretrain_epochs": 2}, "pretrain_epochs"),
        ({"pretrain_epochs": 0}, "pretrain_epochs"),
        ({"augment": "mixup"}, "crop-flip"),
        ({"augment": "crop-flip"}, "digits"),
        ({"split_seed": -1}, "split_seed"),
        ({"test_subset": 1}, "test_subset"),
    ],
)
def test_settings_without_meaning_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_trainer(settings(**{"setting": "adaptation"} | changes), console=quiet())  # type: ignore[arg-type]


def test_a_run_whose_checkpoints_are_lost_says_that_it_starts_anew_and_keeps_its_metrics(tmp_path: Path) -> None:
    loop = TrainSettings(epochs=2, batch_size=32, device="cpu")
    new_run(settings("standard", train=loop, frac=FracConfig(method="float")), tmp_path, quiet()).fit()
    before = (tmp_path / "metrics.jsonl").read_text()
    for number in (1, 2):
        for folder in tmp_path.glob("checkpoint-*"):
            shutil.rmtree(folder)
        console = Console(record=True, file=io.StringIO(), width=400)
        resume_run(tmp_path, console).fit()
        kept = f"metrics-before-{number}.jsonl, result-before-{number}.json"
        words = f"no checkpoint, so the run starts anew; the results so far are in {kept}"
        assert words in console.export_text()
    assert (tmp_path / "metrics-before-1.jsonl").read_text() == before
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.long
def test_a_run_whose_checkpoints_of_both_phases_are_lost_starts_both_anew(tmp_path: Path) -> None:
    loop = TrainSettings(epochs=1, batch_size=32, device="cpu")
    run = settings("fine-tuning", pretrain_epochs=1, train=loop, frac=FracConfig(method="float"))
    new_run(run, tmp_path, quiet()).fit()
    for folder in tmp_path.rglob("checkpoint-*"):
        shutil.rmtree(folder)
    with pytest.raises(RunError, match="already holds a run"):
        new_run(run, tmp_path, quiet())
    with pytest.raises(RunError, match="pretrain holds a run: its checkpoint is gone"):
        build_trainer(run, out=tmp_path, console=quiet())
    resume_run(tmp_path, quiet()).fit()
    for phase in (tmp_path, tmp_path / "pretrain"):
        for name in ("metrics.jsonl", "metrics-before-1.jsonl", "result.json", "result-before-1.json"):
            assert (phase / name).read_text()


def test_a_run_that_trains_meanwhile_is_read_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = TrainSettings(epochs=1, batch_size=32, device="cpu")
    trainer = new_run(settings("standard", train=loop, frac=FracConfig(method="static")), tmp_path, quiet())
    trainer.fit()

    def meanwhile(*given: Any) -> Any:
        (tmp_path / "checkpoint-0001").rename(tmp_path / "checkpoint-0002")  # at the end of the next epoch
        return build(*given)

    monkeypatch.setattr("fractrain_fx.training.run.build", meanwhile)
    model, _ = trained_model(tmp_path)
    theirs = weights(trainer)
    assert all(torch.equal(value, theirs[name]) for name, value in model.state_dict().items())


def test_a_model_whose_file_changed_since_it_was_trained_is_named(tmp_path: Path) -> None:
    file, run = tmp_path / "mine.py", tmp_path / "run"
    file.write_text(TINY.read_text())
    loop = TrainSettings(epochs=1, batch_size=32, device="cpu")
    new_run(settings("standard", model=f"{file}:net", train=loop), run, quiet()).fit()
    file.write_text(TINY.read_text().replace("nn.Linear(8, num_classes)", "nn.Linear(8, num_classes, bias=False)"))
    with pytest.raises(RunError, match="checkpoint-0001 does not fit this model: take the model it was made with"):
        trained_model(run)


def test_a_run_that_cannot_start_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pretrained = settings("fine-tuning", frac=FracConfig(targets=(30.0,)))  # which only the second phase finds out
    for run, error in ((settings("standard", data="digit"), DataError), (pretrained, TargetError)):
        for out in (None, tmp_path / "named"):
            with pytest.raises(error):
                new_run(run, out, quiet())
            assert list(tmp_path.iterdir()) == []


def test_a_run_without_a_folder_gets_a_new_one_and_lets_it_go_when_it_has_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = settings("standard", train=TrainSettings(epochs=1, batch_size=64, device="cpu"))
    first, second = new_run(run, None, quiet()), new_run(run, None, quiet())
    assert [str(each.out) for each in (first, second)] == ["runs/fractrain-tiny.py-net-digits-1", str(second.out)]
    assert second.out == Path("runs/fractrain-tiny.py-net-digits-2")
    first.fit()
    assert first.held is not None and first.held.released and second.held is not None and not second.held.released


def test_the_name_of_a_run_has_its_format_and_that_it_is_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    static = {"model": "timm:resnet18", "method": "static", "precision": "FW-8/BW-8"}
    names = [
        hold_folder(RunSettings.from_dict(static | more)).path.name
        for more in (
            {},
            {"format": "mx", "format_recipe": "mxfp8"},
            {"format": "fp8", "pins": ["last=bfloat16"]},
            {"pins": ["last=FW-8/BW-16"]},
        )
    ]
    rest = "timm-resnet18-digits-1"
    assert names == [f"static-{rest}", f"static-mxfp8-{rest}", f"static-fp8-pinned-{rest}", f"static-pinned-{rest}"]


def test_metrics_without_a_checkpoint_are_not_overwritten_by_a_new_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(RunError, match="already holds a run"):
        new_run(settings("standard"), tmp_path, quiet())
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"


def test_a_model_with_other_outputs_than_classes_is_refused_before_it_trains(tmp_path: Path) -> None:
    file = tmp_path / "nine.py"
    file.write_text(TINY.read_text().replace("TinyNet(num_classes)", "TinyNet(9)"))
    with pytest.raises(ModelError, match="has 9 outputs, and 'digits' has 10 classes"):
        new_run(settings("standard", model=f"{file}:net"), tmp_path / "run", quiet())
    assert not (tmp_path / "run").exists()
