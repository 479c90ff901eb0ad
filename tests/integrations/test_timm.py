"""timm's own training pieces on scikit-learn's digits."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.task import LogitDistillationTask
from timm.utils import ModelEmaV3
from torch import nn

from examples import timm_train
from fractrain_fx import FracConfig, FracModel, RunConfig, fractrainify
from fractrain_fx.errors import ConfigError, CostTermError
from fractrain_fx.integrations.timm import FracTrainTask, FracTrainTaskMixin
from tests import build
from tests.build import made_once, paper
from tests.integrations.digits import digits
from tests.training.tiny import TinyNet

TWO_STAGES = paper(targets=(1.0, 3.0), schedule="manual", run=RunConfig(length=2))


@made_once
def rewritten(config: FracConfig = TWO_STAGES) -> FracModel:
    torch.manual_seed(3)
    return build.rewritten(TinyNet(), torch.rand(2, 3, 8, 8), config=config)


def train(task: Any, epochs: int, optimizer: Any = None, first: int = 0) -> list[dict[str, Any]]:
    images, labels = digits(64).tensors
    mixup = Mixup(mixup_alpha=0.2, label_smoothing=0.1, num_classes=10)
    optimizer = optimizer or create_optimizer_v2(task.get_trainable_module(), opt="sgd", lr=0.1)
    results = []
    for epoch in range(first, first + epochs):
        torch.manual_seed(epoch)
        task.train()
        for rows in torch.arange(64).split(16):
            results.append(task(*mixup(images[rows], labels[rows])))
            results[-1]["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            task.update_ema()
        task.end_epoch()
    return results


@pytest.mark.long
def test_the_example_script_runs(capsys: pytest.CaptureFixture[str]) -> None:
    timm_train.main(images=128, epochs=1)
    assert "epoch 1: loss" in capsys.readouterr().out


def test_optimizer_scheduler_mixup_and_ema_work_with_a_task() -> None:
    model = rewritten()
    task = FracTrainTask(model, SoftTargetCrossEntropy(), verbose=False)
    task.setup_ema(decay=0.5)
    groups = model.param_groups(gates={"lr": 0.3}, decay_norms_and_biases=False)
    optimizer = create_optimizer_v2(groups, opt="adamw", lr=1e-2, weight_decay=0.1)
    scheduler, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=4, min_lr=0.0)
    results = train(task, 2, optimizer)
    scheduler.step(2)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([5e-3, 5e-3, 0.15])
    assert all(result["output"].shape == (16, 10) for result in results)
    assert any(
        result["loss"] != result["task_loss"] for result in results
    )  # where no sample takes any cost, both are it
    assert [(row.stage, row.samples) for row in task.engine.ledger.rows] == [(0, 64), (1, 64)]
    averaged: Any = task.get_eval_model(ema=True)
    images = digits(64).tensors[0]
    task.eval()
    with torch.no_grad():
        assert averaged(images).isfinite().all() and not torch.equal(averaged(images), model(images))
    assert task(images, torch.zeros(64, 10)).keys() == {"loss", "output"}  # in evaluation nothing is added


def test_an_ema_of_a_pfq_model_has_the_stage_of_its_source() -> None:
    model = rewritten(FracConfig(method="pfq", schedule="manual", run=RunConfig(length=2), stages="FW(4,8)/BW(6,8)"))
    average = ModelEmaV3(model, decay=0.5)
    task = FracTrainTask(model, SoftTargetCrossEntropy(), verbose=False)
    train(task, 1)
    average.update(model)
    bits = {name: int(value) for name, value in average.module.named_buffers() if name.endswith((".fw", ".bw"))}
    assert set(bits.values()) == {8}


def test_timms_checkpoints_keep_the_engine() -> None:
    whole = FracTrainTask(rewritten(), SoftTargetCrossEntropy(), verbose=False)
    train(whole, 1)
    state = copy.deepcopy(whole.get_checkpoint_state())
    json.dumps(state["task_state"])
    resumed = FracTrainTask(rewritten(), SoftTargetCrossEntropy(), verbose=False)
    resumed.load_checkpoint_state(state["state_dict"], state["task_state"])
    assert resumed.engine.stage == 1
    assert resumed.engine.ledger.to_dict() == whole.engine.ledger.to_dict()


def test_any_task_takes_the_mixin() -> None:
    class Distil(FracTrainTaskMixin, LogitDistillationTask):
        pass

    from timm.task import DistillationTeacher

    teacher = DistillationTeacher(timm.create_model("test_resnet", num_classes=10), num_classes=10, in_chans=3)
    images, labels = digits(16).tensors
    images = nn.functional.interpolate(images, scale_factor=4)
    student = fractrainify(timm.create_model("test_resnet", num_classes=10), example_inputs=(images[:2],), check=False)
    task = Distil(student, teacher, SoftTargetCrossEntropy(), verbose=False)
    result = task.train()(images, nn.functional.one_hot(labels, 10).float())
    result["loss"].backward()
    task.end_epoch()
    assert task.engine.ledger.samples == 16


def test_what_drops_the_cost_term_or_was_not_rewritten_is_an_error() -> None:
    with pytest.raises(ConfigError, match="fractrainify"):
        FracTrainTask(TinyNet(), verbose=False)
    task = FracTrainTask(rewritten(), verbose=False)
    images, labels = digits(16).tensors
    output = task.train()(images, labels)["output"]
    nn.functional.cross_entropy(output, labels).backward()
    with pytest.raises(CostTermError, match="the training loop dropped the cost term"):
        task.end_epoch()
