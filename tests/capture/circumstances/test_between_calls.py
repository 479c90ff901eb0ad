"""Attributes that one kind of call sets and another one reads."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx.errors import CaptureError
from tests import build

X = torch.randn(2, 4)


class Observer(nn.Module):
    """Divides by the largest value of the last training step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.largest = nn.Linear(4, 4), torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.training:
            self.largest = y.detach().abs().max()
        return y / self.largest


class Memory(nn.Module):
    """A call with an image is remembered by those without."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(4, 4), torch.zeros(4)

    def forward(self, x: Tensor, image: Tensor | None = None) -> Tensor:
        if image is not None:
            self.seen = self.layer(image).detach().mean(0)
        return self.layer(x) + self.seen


class Tables(nn.Module):
    """Makes its table in whichever mode comes first, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.length, self.calls = nn.Linear(4, 4), 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.length != x.shape[-1]:
            self.length, self.table = x.shape[-1], torch.arange(x.shape[-1]).float()
        return self.layer(x) + self.table


@torch.no_grad()
def test_a_part_that_reads_in_evaluation_what_training_set_stays_one_call() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Observer(), nn.Linear(4, 4))
    model = build.rewritten(copy.deepcopy(net), X, method="float")
    for training in (True, False, True, False):
        x = torch.randn(2, 4)
        assert torch.equal(net.train(training)(x), model.train(training)(x))


def test_a_model_that_reads_in_evaluation_what_training_set_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"sets largest in train mode .* hold it in a buffer"):
        build.rewritten(Observer(), X, method="float")


@torch.no_grad()
def test_what_calls_with_other_arguments_set_is_told_of() -> None:
    model = build.rewritten(Memory(), X, method="float")
    model(X)
    with pytest.warns(UserWarning, match=r"sets seen .* in some calls and reads it in others"):
        model(X, image=X)


@torch.no_grad()
def test_tables_and_counters_are_no_such_attributes() -> None:
    net = nn.Sequential(Tables(), nn.Linear(4, 4))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "forward counts in")
        warnings.filterwarnings("error", ".*carries nothing")
        model = build.rewritten(copy.deepcopy(net), X, method="float")
    for training in (True, False):
        assert torch.equal(net.train(training)(X), model.train(training)(X))
    assert "0.layer" in {op.name for op in model.ops}
