"""Plain loops with accelerate, AMP, accumulation, checkpointing, EMA, parameter groups; see also test_compile.py."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from fractrain_fx import Engine, FracConfig, RunConfig, fractrainify
from fractrain_fx.errors import CaptureError, ConfigError, CostTermError
from tests.integrations.digits import digits
from tests.plain import rewritten
from tests.training.tiny import Plain


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def batch(count: int = 16) -> tuple[Tensor, Tensor]:
    images, labels = digits(count).tensors
    return images, labels


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_amp_trains_with_the_loss_in_full_precision(dtype: torch.dtype) -> None:
    model = rewritten()
    engine, optimizer = Engine(model), torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=dtype == torch.float16)
    images, labels = batch()
    losses = []
    for _ in range(8):
        with torch.autocast("cpu", dtype=dtype):
            task = F.cross_entropy(model(images), labels)
        loss = engine.loss(task.float())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        assert all(gradient.isfinite().all() for gradient in gradients(model).values())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(task.detach()))
    engine.require_backward("this loop")
    assert losses[-1] < losses[0] and scaler.get_scale() == (1024 if dtype == torch.float16 else 1)
    engine.end_epoch()
    assert engine.ledger.rows[0].loss == pytest.approx(sum(losses) / 8, rel=1e-3)


def test_accelerate_accumulates_as_engine_is_told(tmp_path: Path) -> None:
    from accelerate import Accelerator

    from fractrain_fx.training import TrainSettings
    from fractrain_fx.training.processes import make_accelerator

    # One process can have one kind of Accelerator, and other tests have theirs.
    accelerator: Accelerator = make_accelerator(TrainSettings(device="cpu", accumulate=2, seed=0))
    model = rewritten()
    before = copy.deepcopy(model.state_dict())
    engine = Engine(model, accumulate=2)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    images, labels = batch()
    for rows in torch.arange(16).split(8):
        with accelerator.accumulate(prepared):
            accelerator.backward(engine.loss(F.cross_entropy(prepared(images[rows]), labels[rows])))
            optimizer.step()
            optimizer.zero_grad()
        changed = [name for name in before if not torch.equal(before[name], model.state_dict()[name])]
        assert any(not name.startswith("frac.") for name in changed) == (rows[0] == 8)  # ranges move at each batch
    engine.require_backward("this loop")
    engine.end_epoch()
    assert engine.ledger.samples == 16


def test_a_checkpointed_model_has_the_same_gradients_gates_included() -> None:
    images, labels = batch()
    seen = []
    for again in (False, True):
        model = rewritten()
        engine = Engine(model)
        torch.manual_seed(1)
        output = checkpoint(model, images, use_reentrant=False) if again else model(images)
        engine.loss(F.cross_entropy(output, labels)).backward()
        engine.require_backward("this loop")
        seen.append(gradients(model))
    assert seen[0].keys() == seen[1].keys() and any(name.startswith("frac.") for name in seen[0])
    assert [name for name in seen[0] if not torch.equal(seen[0][name], seen[1][name])] == []


def test_an_averaged_model_evaluates_with_averaged_weights() -> None:
    model = rewritten()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    engine, optimizer = Engine(model), torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = batch()
    trail = []
    for _ in range(3):
        engine.loss(F.cross_entropy(model(images), labels)).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        trail.append(model.head.weight.detach().clone())
    expected = 0.25 * trail[0] + 0.25 * trail[1] + 0.5 * trail[2]  # the first update copies
    averaged: Any = average.module
    torch.testing.assert_close(averaged.head.weight, expected)
    average.eval()
    plain = averaged.restore()
    assert type(plain) is Plain and torch.equal(plain.head.weight, averaged.head.weight)
    with torch.no_grad():
        assert average(images).isfinite().all()


def test_gates_get_a_group_of_their_own_and_vectors_one_without_decay() -> None:
    model = rewritten()
    inserted = {id(p) for name, p in model.named_parameters() if name.startswith("frac.")}
    vectors = {id(p) for p in model.restore().parameters() if p.ndim <= 1}
    groups = model.param_groups(gates={"lr": 0.3}, decay_norms_and_biases=False)
    held = [{id(p) for p in group["params"]} for group in groups]
    assert held[1] == vectors and held[2] == inserted
    assert held[0] | held[1] | held[2] == {id(p) for p in model.parameters()}
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.2)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (0.1, 0.2),
        (0.1, 0),
        (0.3, 0),
    ]
    assert [len(group["params"]) for group in model.param_groups()] == [len(list(model.parameters()))]
    assert len(rewritten("pfq").param_groups(gates={})) == 1  # no gates, no group


def test_a_loop_that_leaves_the_cost_term_out_can_be_found_out() -> None:
    model = rewritten()
    engine = Engine(model)
    images, labels = batch()
    loss = F.cross_entropy(model(images), labels)
    engine.loss(loss)
    loss.backward()
    with pytest.raises(CostTermError, match="this loop dropped the cost term"):
        engine.require_backward("this loop")
    engine.require_backward("this loop")  # said once
    with pytest.raises(ConfigError, match="accumulate=0"):
        engine.accumulate = 0


@pytest.mark.parametrize(
    "config",
    [FracConfig(method="static"), FracConfig(method="static", format="fp8", run=RunConfig(torchao=True))],
    ids=["plain", "torchao"],
)
def test_a_gradient_penalty_is_refused_and_taken_through_the_original(config: FracConfig) -> None:
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    x = torch.randn(8, 4, requires_grad=True)
    model = fractrainify(net, config=config, example_inputs=(x,))
    with pytest.raises(ConfigError, match=r"create_graph=True.*plain = model\.restore\(\)"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (slope,) = torch.autograd.grad(model.restore()(x).sum(), x, create_graph=True)
    Engine(model).loss(model(x).square().mean() + slope.square().mean()).backward()
    assert all(p.grad is not None for p in net.parameters())


@pytest.mark.long
def test_a_detector_trains_with_its_backbone_rewritten() -> None:
    import torchvision

    torch.manual_seed(0)
    detector = torchvision.models.detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None)
    images = [torch.rand(3, 64, 64), torch.rand(3, 48, 64)]
    targets = [{"boxes": torch.tensor([[8.0, 8.0, 40.0, 40.0]]), "labels": torch.tensor([1])} for _ in images]
    with pytest.raises(CaptureError, match=r"model.backbone = fractrainify\(model.backbone"):
        fractrainify(detector, example_inputs=(images, targets))

    backbone, names = detector.backbone, set(detector.state_dict())
    detector.backbone = fractrainify(backbone, example_inputs=(torch.rand(2, 3, 128, 128),))
    engine = Engine(detector.backbone)
    losses = detector.train()(images, targets)
    engine.loss(sum(losses.values())).backward()
    assert all(bool(p.grad.isfinite().all()) for p in detector.backbone.parameters() if p.requires_grad)
    assert {name for name in detector.state_dict() if ".frac." not in name} == names
    detector.backbone = detector.backbone.restore()
    assert detector.backbone is backbone
    assert len(detector.eval()(images)) == 2
