"""DoReFa against its paper's formulas (ALGORITHM 2)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fractrain_fx.formats import ValueRange
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.formats.dorefa import DoReFaFormat

DOREFA = DoReFaFormat()
RANGE = ValueRange(torch.tensor(0.0), torch.tensor(1.0))


def nearest(unit: Tensor, bits: int) -> Tensor:
    return ((2**bits - 1) * unit.double()).round() / (2**bits - 1)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_activations_are_clipped_to_the_unit_and_rounded(bits: int) -> None:
    x = torch.linspace(-1, 2, 301)
    rounded = DOREFA.activation(x, bits, RANGE)
    torch.testing.assert_close(rounded.double(), nearest(x.clamp(0, 1), bits), rtol=1e-6, atol=1e-7)


def test_clipped_activations_get_no_gradient_unless_they_stay_float() -> None:
    x = torch.tensor([[-1.0, 0.3, 2.0], [-1.0, 0.3, 2.0]])
    assert DOREFA.activation_gradient(x, torch.ones(2, 3), torch.tensor([[4], [32]])).tolist() == [[0, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_weights_fill_the_levels_from_minus_one_to_one(bits: int) -> None:
    w = torch.randn(8, 5)
    squashed = w.double().tanh()
    expected = 2 * nearest(squashed / (2 * squashed.abs().max()) + 0.5, bits) - 1
    torch.testing.assert_close(DOREFA.weight(w, bits, dim=0).double(), expected, rtol=1e-6, atol=1e-6)
    assert DOREFA.weight(w, bits, dim=0).abs().max() == 1


def test_weights_have_the_gradient_of_the_formula_without_its_rounding() -> None:
    w = torch.randn(8, 5, requires_grad=True)
    upstream = torch.randn(8, 5)
    squashed = w.tanh()
    (smooth,) = torch.autograd.grad(squashed / squashed.abs().max(), w, upstream)
    torch.testing.assert_close(DOREFA.weight_gradient(w.detach(), upstream, 3), smooth, rtol=1e-5, atol=1e-6)
    assert torch.equal(DOREFA.weight_gradient(w.detach(), upstream, 32), upstream)


@pytest.mark.parametrize("axis", [BatchAxis(0), BatchAxis(1), BatchAxis(0, 2), BatchAxis(0, 2, major=False)], ids=str)
def test_gradients_are_scaled_by_each_sample_and_unbiased(axis: BatchAxis) -> None:
    g = torch.randn(4, 4) * 10.0 ** axis.expand(torch.arange(4 // axis.factor), (4, 4))
    draws = torch.stack([DOREFA.gradient(g, 3, axis=axis) for _ in range(2000)])
    largest = axis.expand(axis.samples_first(g.abs()).amax(1), g.shape)
    numbers = (draws / (2 * largest) + 0.5) * 7
    torch.testing.assert_close(numbers, numbers.round(), rtol=0, atol=1e-5)
    # Levels lie 2 m / 7 apart; at most half of that off in one draw, six standard deviations of the mean.
    assert ((draws.mean(0) - g).abs() < 6 * (largest / 7) / 2000**0.5).all()


def test_a_sample_without_gradient_gets_none() -> None:
    g = torch.randn(3, 50)
    g[1] = 0
    assert not DOREFA.gradient(g, 2, axis=BatchAxis())[1].any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_value_is_never_hidden(bad: float) -> None:
    x = torch.tensor([[0.5, bad], [0.5, 1.0]])
    assert not DOREFA.activation(x, 4, RANGE)[0, 1].isfinite()
    assert not DOREFA.weight(x, 4, dim=0)[0, 1].isfinite()
    rounded = DOREFA.gradient(x, 4, axis=BatchAxis())
    assert not rounded[0, 1].isfinite() and rounded[1].isfinite().all()
