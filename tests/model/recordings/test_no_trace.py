"""Comparing a call with the model leaves no trace, and needs what the model needs: hooks, sparse gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import FracConfig, FracModel
from tests.build import rewritten

CALLS = 18  # calls 8 and 16 are compared


class Pair(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)


class LooseMean(Pair):
    """Keeps a running mean in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.mean(0), alpha=0.5)
        return torch.as_tensor(self.last(self.first(x - self.mean)))


class LooseTeacher(Pair):
    """Updates a teacher in a list, which is no part of the model, from the student."""

    def __init__(self) -> None:
        super().__init__()
        self.teachers = [nn.Linear(4, 4)]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, quick in zip(self.teachers[0].parameters(), self.first.parameters(), strict=True):
                slow.mul_(0.9).add_(quick, alpha=0.1)
        return torch.as_tensor(self.last(self.first(x)) - self.teachers[0](x).detach())


class LooseNorm(Pair):
    """Holds a batch norm in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = [nn.BatchNorm1d(4)]

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.last(self.norms[0](self.first(x))))


class InnerLoss(Pair):
    """Goes backward itself."""

    def forward(self, x: Tensor) -> Tensor:
        loss = self.last(self.first(x)).square().mean()
        loss.backward()
        return torch.as_tensor(loss.detach())


class HookedFeatures(Pair):
    """Collects the outputs of its layers by hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.features: dict[str, Tensor] = {}
        self.body[0].register_forward_hook(self.keep)

    def keep(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.features["first"] = output

    def forward(self, x: Tensor) -> Tensor:
        self.features.clear()
        y = self.body(x)
        return torch.as_tensor(self.last(y) + self.features["first"])


def pair(net: nn.Module, *inputs: Tensor) -> tuple[Any, FracModel]:
    return copy.deepcopy(net), rewritten(net, *inputs, config=FracConfig(method="float"), check=True)


def everything(net: nn.Module) -> list[Tensor]:
    """Tensors of a model and of what it holds, and gradients."""
    loose = [part for value in vars(net).values() for part in (value if isinstance(value, list) else [value])]
    tensors = [x for x in loose if isinstance(x, Tensor)]
    modules = [net, *(part for part in loose if isinstance(part, nn.Module))]
    tensors += [x for part in modules for x in (*part.parameters(), *part.buffers())]
    return tensors + [p.grad for p in net.parameters() if p.grad is not None]


@pytest.mark.parametrize("kind", [LooseMean, LooseTeacher, LooseNorm, InnerLoss, HookedFeatures])
def test_compared_calls_leave_all_tensors_as_the_model_does(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    net: Any = kind()
    reference, model = pair(net, torch.randn(3, 4))
    for _ in range(CALLS):
        x = torch.randn(3, 4)
        for one in (reference, net):
            one.zero_grad()
            with torch.no_grad():
                one.first.weight.add_(0.01)
        assert torch.equal(reference(x), model(x))
        for mine, other in zip(everything(net), everything(reference), strict=True):
            assert torch.equal(mine, other)


def test_a_compared_call_between_a_forward_and_its_backward_changes_nothing_that_backward_needs() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    reference, model = pair(net, torch.randn(3, 4))
    for count in range(2, CALLS):
        x, y = torch.randn(2, count, 4)
        for one in (reference, model):
            one.zero_grad()
            (one(x) - one(y)).square().mean().backward()
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)


def test_a_model_with_sparse_gradients_is_recorded_and_compared() -> None:
    net = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4))
    tokens = torch.arange(6).view(2, 3)
    reference, model = pair(net, tokens)
    for one in (reference, model):
        one(tokens).sum().backward()
    gradients = [next(one.parameters()).grad for one in (reference, model)]
    assert all(gradient is not None and gradient.is_sparse for gradient in gradients)
    torch.testing.assert_close(*(gradient.to_dense() for gradient in gradients if gradient is not None))
