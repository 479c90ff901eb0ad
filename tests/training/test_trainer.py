"""Training end to end on a network of a second: every method, going on, stopping, and what is written."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console

from fractrain_fx.config import FracConfig
from fractrain_fx.errors import ConfigError, NonFiniteLossError, RunError
from fractrain_fx.training import RunSettings, TrainSettings, build_trainer, new_run, results_table, resume_run
from fractrain_fx.training.trainer import Trainer

TINY = Path(__file__).with_name("tiny.py")


def settings(method: str = "fractrain", function: str = "net", epochs: int = 2, **train: object) -> RunSettings:
    frac = FracConfig(method=method, schedule="manual", epochs=epochs)  # type: ignore[arg-type]
    loop = TrainSettings(**{"epochs": epochs, "batch_size": 32, "lr": 0.05, "device": "cpu"} | train)  # type: ignore[arg-type]
    return RunSettings(f"{TINY}:{function}", image_size=8, subset=96, train=loop, frac=frac)


def quiet() -> Console:
    return Console(quiet=True)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.parametrize("method", ["float", "static", "pfq", "dfq", "fractrain", "slu"])
def test_every_method_trains_and_counts_its_cost(method: str) -> None:
    trainer = build_trainer(settings(method, epochs=3), console=quiet())
    result = trainer.fit()
    losses = [row.loss for row in trainer.engine.ledger.rows]
    assert losses[-1] < losses[0]
    assert 0 <= result.mean_cp <= result.mean_cp_total <= 1 and result.mean_cp_total > 0  # SLU may skip all
    assert result.total_macs == pytest.approx(3 * trainer.model.macs * result.mean_cp_total * 3 * 96)
    if method in ("float", "static"):
        assert result.mean_cp == pytest.approx(1.0 if method == "float" else 0.0625)
    assert len(result.turning_points) == (2 if method in ("pfq", "fractrain") else 0)


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    whole = new_run(settings(epochs=4), tmp_path / "whole", quiet())
    whole.fit()

    parts = new_run(settings(epochs=4), tmp_path / "parts", quiet())
    interrupt_in_epoch(parts, 3)
    with pytest.raises(KeyboardInterrupt):
        parts.fit()
    resumed = resume_run(tmp_path / "parts", quiet())
    result = resumed.fit()

    assert result.epochs == 4
    ours, theirs = weights(resumed), weights(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert resumed.engine.state_dict() == whole.engine.state_dict()
    rows = [json.loads(line) for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4]


def interrupt_in_epoch(trainer: Trainer, epoch: int) -> None:
    loss = trainer.engine.loss

    def interrupting(task_loss: torch.Tensor) -> torch.Tensor:
        if len(trainer.engine.ledger.rows) == epoch - 1:
            raise KeyboardInterrupt
        return loss(task_loss)

    trainer.engine.loss = interrupting  # type: ignore[method-assign]


def test_a_run_interrupted_before_its_first_epoch_can_go_on(tmp_path: Path) -> None:
    trainer = new_run(settings(), tmp_path, quiet())
    interrupt_in_epoch(trainer, 1)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert resume_run(tmp_path, quiet()).fit().epochs == 2


def test_a_run_folder_holds_settings_metrics_and_the_result(tmp_path: Path) -> None:
    result = new_run(settings(), tmp_path, quiet()).fit()
    names = {path.name for path in tmp_path.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "result.json", "checkpoint-0002", "tensorboard"} == names
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert {"epoch", "stage", "loss", "cp", "cp_total", "test_accuracy", "total_macs", "options"} <= first.keys()
    assert json.loads((tmp_path / "result.json").read_text())["total_macs"] == result.total_macs


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    new_run(settings(), tmp_path, quiet()).fit()
    with pytest.raises(RunError, match="--resume"):
        new_run(settings(), tmp_path, quiet())


def test_resuming_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no run"):
        resume_run(tmp_path, quiet())


def test_a_diverging_run_stops_and_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    trainer = new_run(settings("static", "diverging"), tmp_path, quiet())
    with pytest.raises(NonFiniteLossError, match="epoch 1"):
        trainer.fit()
    assert (tmp_path / "checkpoint-0000" / "model.safetensors").exists()


def test_the_seed_decides_the_run() -> None:
    results = []
    for seed in (0, 0, 1):
        trainer = build_trainer(settings(seed=seed), console=quiet())
        trainer.fit()
        results.append(weights(trainer))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    assert any(not torch.equal(results[0][name], results[2][name]) for name in results[0])


def test_accumulated_batches_make_one_optimizer_step() -> None:
    trainer = build_trainer(settings("float", accumulate=3, epochs=1), console=quiet())
    steps: list[object] = []
    trainer._optimizer.optimizer.register_step_post_hook(lambda *arguments: steps.append(arguments))
    trainer.fit()
    assert len(steps) == 1


def test_evaluation_sees_every_test_sample() -> None:
    trainer = build_trainer(settings("float", epochs=1), console=quiet())
    trainer.fit()
    model, data = trainer.model.eval(), trainer.data
    inputs, targets = data.prepare(data.test.tensors[0]), data.test.tensors[1]
    with torch.no_grad():
        right = (model(inputs).argmax(1) == targets).float().mean()
    loss, accuracy = trainer.evaluate()
    assert accuracy == pytest.approx(100 * float(right)) and math.isfinite(loss)


def test_text_is_trained_by_perplexity() -> None:
    run = RunSettings(
        "hf:gpt2", "pydoc", block_length=16, subset=64, train=TrainSettings(epochs=2, batch_size=16, device="cpu")
    )
    result = build_trainer(run, console=quiet()).fit()
    assert result.metric == "perplexity" and 1 < result.value < 200


def test_a_device_that_is_not_there_is_refused() -> None:
    if torch.backends.mps.is_available():
        pytest.skip("this machine has it")
    with pytest.raises(ConfigError, match="mps"):
        build_trainer(settings(device="mps"), console=quiet())


def test_the_table_compares_runs() -> None:
    results = [build_trainer(settings(method, epochs=1), console=quiet()).fit() for method in ("float", "static")]
    console = Console(width=100, record=True, quiet=True)
    with console.capture() as capture:
        console.quiet = False
        console.print(results_table(results))
    text = capture.get()
    assert "100.00" in text and "6.25" in text and f"{results[1].total_macs:.3e}" in text
