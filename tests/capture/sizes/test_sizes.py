"""Sizes are numbers to the model and nodes to the graph."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import FracConfig, fractrainify
from fractrain_fx.capture import record
from fractrain_fx.capture.sizes.symbolic import SymbolicFloat, SymbolicInt, plain, symbolic_shape
from fractrain_fx.errors import InputError


def test_arithmetic_stays_symbolic_and_comparison_is_concrete() -> None:
    rows, columns = symbolic_shape(torch.zeros(3, 8))
    for value, expected in [
        (rows * 2 + 1, 7),
        (10 - rows, 7),
        (columns // 2, 4),
        (-rows, -3),
        (rows**2, 9),
        (math.ceil(columns / 3), 3),
        (math.prod([rows, columns]), 24),
        (divmod(columns, rows)[1], 2),
    ]:
        assert isinstance(value, SymbolicInt)
        assert value == expected
    assert isinstance(columns**-0.5, SymbolicFloat)
    assert rows < columns
    assert f"{rows}" == "3"
    assert list(range(rows)) == [0, 1, 2]
    assert type(plain((rows, [columns]))[1][0]) is int
    assert copy.deepcopy(rows) == 3


class Reshaping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.linear(x).reshape(batch * length, width)
        y = y + torch.arange(len(y), device=x.device)[:, None] / x.size(1)
        y = y.view(*x.shape[:-1], 2, width // 2).sum(-1)
        return y * (x.numel() / 4) + torch.zeros(y.shape) + x.shape[0]


@pytest.mark.parametrize("shape", [(2, 3, 4), (5, 3, 4), (1, 7, 4)])
def test_a_graph_runs_at_sizes_that_it_was_not_recorded_with(shape: tuple[int, ...]) -> None:
    model = Reshaping()
    recording = record(model, (torch.randn(2, 3, 4),))
    x = torch.randn(shape)
    assert torch.equal(recording.train(x), model(x))


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


def test_a_model_made_for_one_batch_size_is_recorded_and_says_so() -> None:
    recording = record(Fixed(), (torch.randn(2, 4),))
    assert recording.fixed_batch
    assert recording.checked


class CountsItsSamples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = [self.stem(x[i] * (i + 1)) for i in range(len(x))]
        x = torch.stack(rows)
        return self.head(x + self.body(x))


def test_a_model_that_counts_its_samples_is_recorded_anew_for_another_number() -> None:
    model = CountsItsSamples()
    assert record(model, (torch.randn(3, 4),)).fixed_batch
    rewritten = fractrainify(model, config=FracConfig(method="float"), example_inputs=(torch.randn(3, 4),))
    for samples in (3, 2):
        x = torch.randn(samples, 4)
        assert torch.equal(rewritten(x), model(x))


def test_a_model_made_for_one_batch_size_refuses_others_in_its_own_words() -> None:
    rewritten = fractrainify(Fixed(), config=FracConfig(method="float"), example_inputs=(torch.randn(2, 4),))
    with pytest.raises(InputError, match=r"\(3, 4\).*recorded for x.size\(0\) == 2.*must match the size"):
        rewritten(torch.randn(3, 4))
