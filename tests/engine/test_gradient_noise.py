"""The trigger that compares the gradient with the noise that rounding adds to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fractrain_fx import Engine, FracConfig, FracModel, Steps, fractrainify
from fractrain_fx.engine.gradient_noise import GradientNoiseSchedule, GradientProbe
from fractrain_fx.errors import ConfigError, RunError
from fractrain_fx.formats.microscaling import fake_quantize
from fractrain_fx.nn.rounding import unrounded_gradients

BATCHES = torch.randn(2, 16, 3, 8, 8, generator=torch.Generator().manual_seed(1))
TARGETS = torch.arange(16) % 4


def net() -> nn.Module:
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 16), nn.ReLU()]
    return nn.Sequential(*body, nn.Linear(16, 4))


def rewritten(**settings: Any) -> FracModel:
    usual = {"method": "pfq", "stages": "FW(4,8)/BW(4,8)", "schedule": "gradient-noise", "every": Steps(2)}
    return fractrainify(net(), config=FracConfig(**usual | settings), example_inputs=(BATCHES[0],), check=False)


def gradients(model: FracModel) -> Tensor:
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


@pytest.mark.parametrize("format", ["mx", "affine"])
def test_noise_is_what_rounding_in_backward_adds_to_the_steps_gradient(format: str) -> None:
    model = rewritten(format=format)
    engine = Engine(model, accumulate=2)
    seen: list[tuple[float, float]] = []
    engine._plan.schedule.see_gradients = lambda *norms: seen.append(norms)  # type: ignore[attr-defined]
    found = []
    for exact in (False, True):
        torch.manual_seed(5)
        for x in BATCHES:
            loss = F.cross_entropy(model(x), TARGETS)
            if not exact:
                (engine.loss(loss) / 2).backward()
                continue
            with unrounded_gradients():
                (loss / 2).backward()
        found.append(gradients(model))
        model.zero_grad()
    engine.end_step()
    rounded, exactly = found
    noise = float((rounded - exactly).norm())
    assert seen == [pytest.approx((float(rounded.norm()), noise), rel=1e-4)]
    assert noise > 0.01 * float(rounded.norm())


def test_backward_without_rounding_multiplies_what_the_forward_pass_rounded() -> None:
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    x = torch.randn(8, 64)
    config = FracConfig(method="static", precision="FW-4/BW-4", format="mx")  # type: ignore[arg-type]
    model = fractrainify(layers, config=config, example_inputs=(x,), check=False)
    with unrounded_gradients():
        model(x).square().sum().backward()
    found = [each.grad for each in layers.parameters()]
    layers.zero_grad()
    first, middle, last = layers
    rounded = fake_quantize(first(x), "e2m1"), fake_quantize(middle.weight, "e2m1")
    last(F.linear(*rounded, middle.bias)).square().sum().backward()
    torch.testing.assert_close(found, [each.grad for each in layers.parameters()])


def test_it_moves_below_the_root_of_three_and_keeps_its_place() -> None:
    schedule = GradientNoiseSchedule(3)
    schedule.see_gradients(2.0, 1.0)
    assert schedule.update(1.0) == 0
    schedule.see_gradients(1.7, 1.0)
    again = GradientNoiseSchedule(3)
    again.load_state_dict(schedule.state_dict())
    assert again.update(1.0) == 1 and again.update(1.0) == 1
    again.see_gradients(1.0, 1.0)
    assert again.update(1.0) == 2 and not again.wants_gradients


def test_a_run_raises_its_bits_when_noise_drowns_the_gradient_and_is_not_changed_by_looking() -> None:
    losses = []
    for schedule in ("gradient-noise", "fixed"):
        # The trigger fires after the first window: of random targets, little gradient is left over a large batch.
        model = rewritten(format="mx", schedule=schedule, turns=(Steps(2),) if schedule == "fixed" else ())
        engine, optimizer = Engine(model), torch.optim.SGD(model.parameters(), lr=1e-3)
        x = BATCHES[:1, :8].expand(8, -1, -1, -1, -1).flatten(0, 1)
        targets = (torch.arange(64) // 8 + torch.arange(64)) % 4  # each image has each class as often
        torch.manual_seed(5)
        found = []
        for _ in range(4):
            loss = engine.loss(F.cross_entropy(model(x), targets))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.end_step()
            found.append(float(loss.detach()))
        losses.append(found)
        assert engine.stage == 1
    assert losses[0] == losses[1]


def test_what_cannot_be_measured_is_refused() -> None:
    for settings in ({"every": None}, {"execution": "auto", "format": "affine"}):
        with pytest.raises(ConfigError, match="gradient-noise"):
            rewritten(**settings)
    layer = nn.Linear(3, 3)
    probe = GradientProbe(layer)
    probe.add(layer(torch.ones(1, 3)).sum(), 1)
    with pytest.raises(RunError, match="found no rounding"):
        probe.read()
