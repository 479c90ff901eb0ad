"""The paper's optimizers and courses of the learning rate, and runs measured in steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fractrain_fx import FracConfig, fractrainify
from fractrain_fx.training import RunSettings, TrainSettings, build_trainer
from fractrain_fx.training.length import RunLength
from fractrain_fx.training.optim import lr_factor, make_optimizer, make_scheduler
from fractrain_fx.training.settings import GateLr
from tests.training.tiny import net

TINY = Path(__file__).parent / "tiny.py"


def factors(settings: TrainSettings, steps_an_epoch: int = 10) -> list[float]:
    length = RunLength(settings, steps_an_epoch)
    return [lr_factor(length, step) for step in range(length.run_steps)]


def test_the_papers_steps_fall_at_epochs_80_and_120_of_160_and_keep_their_place_in_a_shorter_run() -> None:
    whole = factors(TrainSettings(epochs=160, lr_schedule="steps"))
    assert whole[799] == 1 and whole[800] == pytest.approx(0.1) and whole[1199] == pytest.approx(0.1)
    assert whole[1200] == whole[-1] == pytest.approx(0.01)
    assert factors(TrainSettings(epochs=16, lr_schedule="steps")) == whole[::10]
    by_steps = RunLength(TrainSettings(iterations=64_000, lr_schedule="steps"), 390)
    assert lr_factor(by_steps, 31_999) == 1 and lr_factor(by_steps, 48_000) == pytest.approx(0.01)


def test_inverse_square_root_meets_its_warm_up() -> None:
    rates = factors(TrainSettings(iterations=100, lr_schedule="inverse-sqrt", warm_up=0.16))
    assert max(rates) == rates[15] == 1 and rates[7] == 0.5 and rates[63] == pytest.approx(0.5)


def test_cosine_rises_for_an_epoch_and_falls_to_nearly_nothing() -> None:
    rates = factors(TrainSettings(epochs=10))
    assert rates[0] == 0.1 and rates[9] == 1 and rates[50] == pytest.approx(0.5) and rates[-1] < 0.001
    assert factors(TrainSettings(epochs=2, lr_schedule="constant")) == [1.0] * 20


def test_a_run_of_iterations_has_the_epochs_that_hold_them() -> None:
    assert RunLength(TrainSettings(iterations=25), 10).epochs == 3
    assert RunLength(TrainSettings(epochs=4), 10).epochs == 4


@pytest.mark.parametrize(
    ("name", "task", "kind"),
    [
        (None, "classification", torch.optim.SGD),
        (None, "language", torch.optim.AdamW),
        ("adam", "classification", torch.optim.Adam),
    ],
)
def test_the_optimizer_is_the_one_asked_for_or_the_usual_one(name: str | None, task: str, kind: type) -> None:
    settings = TrainSettings(optimizer=name, betas=(0.9, 0.98), eps=1e-9)  # type: ignore[arg-type]
    optimizer = make_optimizer(nn.Linear(2, 2), settings, task)
    assert type(optimizer) is kind
    if name == "adam":
        assert (optimizer.defaults["betas"], optimizer.defaults["eps"]) == ((0.9, 0.98), 1e-9)


def test_training_stops_in_the_middle_of_an_epoch_and_the_stages_know_how_long_the_run_is() -> None:
    settings = RunSettings.from_dict(
        {"model": f"{TINY}:net", "subset": 64, "image_size": 8, "iterations": 7, "batch_size": 16, "device": "cpu"}
        | {"lr_schedule": "steps", "method": "pfq", "schedule": "manual", "stages": "FW(4,8)/BW(6,8)"}
    )
    trainer = build_trainer(settings)
    result = trainer.fit()
    assert (trainer.epochs, result.epochs) == (2, 2)
    assert [row.samples for row in trainer.engine.ledger.rows] == [64, 48]
    assert [row.level for row in trainer.engine.ledger.rows] == ["FW-4/BW-6", "FW-8/BW-8"]


def test_the_gates_can_keep_their_rate_when_the_models_falls() -> None:
    settings = TrainSettings(epochs=4, lr=0.2, lr_schedule="steps", weight_decay=0.5, gate_lr="peak")
    model = fractrainify(net(10), config=FracConfig(), example_inputs=(torch.randn(2, 3, 8, 8),), check=False)
    optimizer = make_optimizer(model, settings, "classification")
    scheduler = make_scheduler(optimizer, RunLength(settings, 10))
    grouped = [{id(p) for p in group["params"]} for group in optimizer.param_groups]
    assert grouped[0] == {id(p) for p in model.restore().parameters()}
    assert grouped[1] and grouped[0] | grouped[1] == {id(p) for p in model.parameters()}
    rates = []
    for _ in range(40):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    assert rates[0] == [0.2, 0.2] and rates[-1] == pytest.approx([0.002, 0.2])
    # A model without gates has one course.
    plain = make_optimizer(net(10), settings, "classification")
    assert len(make_scheduler(plain, RunLength(settings, 10)).lr_lambdas) == len(plain.param_groups) == 1


def test_the_gates_follow_the_model_and_may_have_a_multiple_of_its_rate() -> None:
    model = fractrainify(net(10), config=FracConfig(), example_inputs=(torch.randn(2, 3, 8, 8),), check=False)
    courses: list[tuple[GateLr, float, float]] = [("model", 1.0, 0.002), ("model", 3.0, 0.006), ("peak", 0.5, 0.1)]
    for gate_lr, factor, last in courses:
        settings = TrainSettings(epochs=4, lr=0.2, lr_schedule="steps", gate_lr=gate_lr, gate_lr_factor=factor)
        optimizer = make_optimizer(model, settings, "classification")
        scheduler = make_scheduler(optimizer, RunLength(settings, 10))
        assert optimizer.param_groups[1]["lr"] == pytest.approx(0.2 * factor)
        for _ in range(39):
            optimizer.step()
            scheduler.step()
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.002, last])
