"""Parts of a model may be in another mode than the model."""

from __future__ import annotations

import copy
from typing import Self

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import FracConfig, FracModel, fractrainify
from fractrain_fx.errors import InputError
from tests.build import rewritten as build_rewritten

FLOAT = FracConfig(method="float")


def pair(net: nn.Module, *inputs: Tensor) -> tuple[nn.Module, FracModel]:
    """A copy of a model, and the model rewritten."""
    return copy.deepcopy(net), build_rewritten(net, *inputs, config=FLOAT, check=True)


class Frozen(nn.Module):
    """Keeps its batch norm in eval mode, as backbones of detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_models_own_train_method_is_followed(wrapped: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    reference, model = pair(nn.Sequential(Frozen(), nn.Linear(4, 2)) if wrapped else Frozen(), x)
    for mode in (True, False, True):
        outputs = [each.train(mode)(x) for each in (reference, model)]
        assert torch.equal(*outputs)
    assert all(torch.equal(x, model.get_buffer(name)) for name, x in reference.named_buffers())


class Folds(nn.Module):
    """Sets a buffer in ``eval``, and not in ``train``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(()))

    def eval(self) -> Self:
        self.scale.fill_(3.0)
        return super().eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


def test_a_models_own_eval_method_is_followed() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    reference, model = pair(Folds(), x)
    for each in (reference, model):
        each.get_buffer("scale").fill_(1.0)
    assert torch.equal(reference.train()(x), model.train()(x))
    assert torch.equal(reference.eval()(x), model.eval()(x)) and float(model.get_buffer("scale")) == 3.0


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.dropout(self.layer(x), 0.5, self.training)
        return y * 2 if self.training else y


def whole() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Part(), nn.Linear(4, 2))


def same(reference: nn.Module, model: FracModel, x: Tensor) -> bool:
    outputs = []
    for each in (reference, model):
        torch.manual_seed(1)
        outputs.append(each(x))
    return torch.equal(*outputs)


@pytest.mark.parametrize("before", [False, True])
def test_a_part_in_eval_mode_gets_a_recording_of_its_own(before: bool) -> None:
    x, net = torch.randn(3, 4), whole()
    if before:
        net.get_submodule("1").eval()
    reference, model = pair(net, x)
    for each in (reference, model):
        each.get_submodule("1").eval()
    assert same(reference, model, x)
    for mode in (True, False):
        assert same(reference.train(mode), model.train(mode), x)
    for each in (reference, model):  # dropout while evaluating
        each.get_submodule("1").train()
    assert same(reference, model, x) and len(list(model._state.variants)) == 3


def test_a_part_in_another_mode_is_named_if_there_is_no_recording_left() -> None:
    x = torch.randn(3, 4)
    model = fractrainify(whole(), config=FLOAT.replace(**{"run.recordings": 1}), example_inputs=(x,))
    model.get_submodule("1").eval()
    with pytest.raises(InputError, match=r"'1' in train mode, which .*test_modes.py.* reads"):
        model(x)


def test_a_compiled_model_follows_the_modes_of_parts() -> None:
    x = torch.randn(3, 4)
    reference, model = pair(whole(), x)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for part in (reference.get_submodule("1"), model.get_submodule("1")):
        part.eval()
    model(x)
    assert torch.equal(reference(x), compiled(x))
    for each in (reference, model):
        each.eval()
    assert torch.equal(reference(x), compiled(x))


@pytest.mark.parametrize("training", [True, False])
def test_calibration_leaves_every_part_in_its_mode(training: bool) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 4))
    x = torch.randn(4, 3, 8, 8)
    model = fractrainify(net, config=FracConfig(method="static"), example_inputs=(x,)).train(training)
    running_mean = net.get_buffer("1.running_mean")
    net[1].eval()
    before, mean = [part.training for part in model.modules()], running_mean.clone()
    model.calibrate([x])
    assert [part.training for part in model.modules()] == before
    assert torch.equal(running_mean, mean) and model.ops[1].precision.rounds
