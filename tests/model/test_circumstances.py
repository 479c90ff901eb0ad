"""Code that asks for the gradient mode, for autocast or for frozen weights is followed from call to call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import FracConfig, FracModel
from fractrain_fx.errors import InputError
from tests.build import rewritten as build_rewritten

FLOAT = FracConfig(method="float")


class Asking(nn.Module):
    """Doubles its output if the answer to a question is yes."""

    def __init__(self, ask: Callable[[Tensor, Any], bool]) -> None:
        super().__init__()
        self.first, self.last, self._ask = nn.Linear(4, 4), nn.Linear(4, 4), ask

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.first(x))
        return y * 2 if self._ask(x, self) else y


def pair(net: nn.Module, x: Tensor) -> tuple[nn.Module, FracModel]:
    """A copy of a model, and the model rewritten."""
    torch.manual_seed(0)
    model = build_rewritten(net, x, config=FLOAT, check=True)
    return copy.deepcopy(net), model


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    ("ask", "within"),
    [
        (lambda x, net: torch.is_grad_enabled(), torch.no_grad),
        (lambda x, net: torch.is_inference_mode_enabled(), torch.inference_mode),
        (lambda x, net: torch.is_autocast_enabled(x.device.type), lambda: torch.autocast("cpu", torch.bfloat16)),
    ],
)
def test_a_mode_around_the_call(
    ask: Callable[..., bool], within: Callable[[], AbstractContextManager[Any]], train: bool
) -> None:
    x = torch.randn(3, 4)
    reference, model = pair(Asking(ask), x)
    reference.train(train), model.train(train)
    for around in (nullcontext, within, nullcontext):
        with around():
            assert torch.equal(reference(x), model(x))
    assert len(list(model._state.variants)) == 2


@pytest.mark.parametrize("ask", [lambda x, net: x.requires_grad, lambda x, net: net.first.weight.requires_grad])
def test_inputs_and_weights_that_require_gradients(ask: Callable[..., bool]) -> None:
    x = torch.randn(3, 4)
    reference, model = pair(Asking(ask), x)
    assert torch.equal(reference(x), model(x))
    for each in (reference, model):
        each.get_submodule("first").requires_grad_(False)
    y = x.clone().requires_grad_()
    assert torch.equal(reference(y), model(y)) and len(list(model._state.variants)) == 2


def test_a_question_about_an_inner_tensor_is_refused_where_it_cannot_be_answered() -> None:
    x = torch.randn(3, 4)
    _, model = pair(Asking(lambda x, net: net.first(x).requires_grad), x)
    model(x)
    with torch.no_grad(), pytest.raises(InputError, match="gradients switched on, which"):
        model(x)


def test_questions_of_torchs_own_code_and_inside_the_models_own_regions_need_no_recording() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = 2 if torch.is_grad_enabled() else 3
            return self.attention(x, x, x)[0] * scale

    x = torch.randn(3, 5, 4)
    reference, model = pair(Attending(), x)
    reference.eval(), model.eval()
    with torch.no_grad():
        assert torch.allclose(reference(x), model(x), atol=1e-6)  # torch takes its fast path here
    assert len(list(model._state.variants)) == 1


class Force(nn.Module):
    """The force in a potential: the gradient of an energy."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.last(torch.tanh(self.first(x))).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_gradient_inside_forward_is_computed_under_no_grad_too(compiled: bool) -> None:
    x = torch.randn(3, 4)
    reference, model = pair(Force(), x)
    reference.eval(), model.eval()
    if compiled:
        model.compile_segments(backend="eager")
    for around in (nullcontext, torch.no_grad):
        with around():
            assert torch.equal(reference(x), model(x))
            assert torch.is_grad_enabled() is (around is nullcontext)
