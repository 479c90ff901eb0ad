"""The Triton kernels of gates on the CPU, by Triton's interpreter. test_triton.py runs this file too."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

from fractrain_fx.config import GateConfig
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.kernels.triton import gate_calls
from fractrain_fx.nn import gate_kernels, gate_triton
from fractrain_fx.nn.gate_kernels import BlockEmbeddingByKernels, ControllerByKernels
from fractrain_fx.nn.gates import BlockEmbedding, Controller
from tests.models import thinned


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_calls, "on_device", lambda x: contextlib.nullcontext())
    monkeypatch.setattr(gate_kernels, "has_triton", lambda x: True)


def test_a_choice_of_several_steps_and_its_gradients_are_those_of_the_plain_operations() -> None:
    for config, options, samples in ((GateConfig(), 5, 37), (GateConfig(dims=(8, 6), hidden=3), 2, 5)):
        ours, plain = ControllerByKernels(config, options, kernels=("cuda",)), Controller(config, options)
        ours.load_state_dict(plain.state_dict())
        found: list[list[Tensor]] = []
        x = torch.randn(3, samples, config.dims[1])
        weights = torch.randn(3, samples, options)
        for controller in (ours, plain):
            given, state, choices = x.clone().requires_grad_(), None, []
            for step, skippable in enumerate((True, False, True)):
                choice, state = controller(given[step], state, skippable)
                choices.append(choice)
            assert state is not None
            loss = (torch.stack(choices) * weights).sum() + state[0].square().sum() + state[1].sin().sum()
            grads = torch.autograd.grad(loss, [given, *controller.parameters()])
            found.append([*choices, *state, *grads])
        for mine, theirs in zip(*found, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        assert (found[0][1].argmax(1) > 0).all()  # the second step was not skippable


def test_a_choice_whose_state_is_not_used_has_the_gradients_of_its_own_step() -> None:
    ours, plain = ControllerByKernels(GateConfig(), 4, kernels=("cuda",)), Controller(GateConfig(), 4)
    ours.load_state_dict(plain.state_dict())
    x, weights = torch.randn(20, 16), torch.randn(20, 4)
    mine, theirs = (
        torch.autograd.grad((each(x, None, True)[0] * weights).sum(), list(each.parameters()), allow_unused=True)
        for each in (ours, plain)
    )
    for own, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(own, torch.zeros_like(own) if other is None else other, rtol=1e-4, atol=1e-5)


def test_a_state_holds_the_packed_weights_of_its_step_and_no_longer() -> None:
    controller = ControllerByKernels(GateConfig(), 4, kernels=("cuda",))
    choice, state = controller(torch.randn(2, 16), None, True)
    assert len(gate_triton._packed) == 1
    choice, state = controller(torch.randn(2, 16), state, True)
    assert len(gate_triton._packed) == 2  # backward keeps the first state
    del choice, state
    assert not gate_triton._packed


def test_a_choice_of_nan_takes_the_first_option_that_it_may() -> None:
    controller = ControllerByKernels(GateConfig(), 3, kernels=("cuda",))
    x = torch.full((2, 16), float("nan"))
    assert controller(x, None, True)[0].tolist() == [[1, 0, 0]] * 2
    assert controller(x, None, False)[0].tolist() == [[0, 1, 0]] * 2


@pytest.mark.parametrize(("features", "dims"), thinned([(3, (8, 5)), (40, (32, 16)), (150, (64, 64))], 3))
def test_an_embedding_and_its_gradients_are_those_of_the_plain_operations(features: int, dims: tuple[int, int]) -> None:
    ours = BlockEmbeddingByKernels(features, 1, BatchAxis(), dims, "he", kernels=("cuda",))
    plain = BlockEmbedding(features, 1, BatchAxis(), dims, "he")
    ours.load_state_dict(plain.state_dict())
    x, weights = torch.randn(19, features), torch.randn(19, dims[1])
    found: list[list[Tensor]] = []
    for embedding in (ours, plain):
        given = x.clone().requires_grad_()
        out = embedding(given)
        found.append([out, *torch.autograd.grad((out * weights).sum(), [given, *embedding.parameters()])])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_wide_layers_are_left_to_the_plain_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_kernels, "embed_on_gpu", lambda *_: pytest.fail("its outputs do not fit"))
    monkeypatch.setattr(gate_kernels, "choose_on_gpu", lambda *_, **__: pytest.fail("its outputs do not fit"))
    BlockEmbeddingByKernels(8, 1, BatchAxis(), (65, 16), "he", kernels=("cuda",))(torch.randn(2, 8))
    ControllerByKernels(GateConfig(hidden=65), 3, kernels=("cuda",))(torch.randn(2, 16), None, True)
