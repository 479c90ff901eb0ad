"""WAGEUBN against its paper's formulas: direct, shift and constant quantization (arXiv 1909.02384)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fractrain_fx.formats import ValueRange
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.formats.wageubn import WageubnFormat

WAGEUBN = WageubnFormat()
RANGE = ValueRange(torch.tensor(-1.0), torch.tensor(2.0))
BITS = st.integers(2, 16)
VALUES = st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=40).map(torch.tensor)


def direct(x: Tensor, bits: int) -> Tensor:
    return (x.double() * 2 ** (bits - 1)).round() / 2 ** (bits - 1)


def shift(x: Tensor) -> float:
    return float(2.0 ** round(math.log2(x.abs().max().item())))


@given(x=VALUES, bits=BITS)
def test_activations_go_to_the_nearest_number_of_a_fixed_grid(x: Tensor, bits: int) -> None:
    rounded = WAGEUBN.activation(x, bits, RANGE)
    assert torch.equal(rounded.double(), direct(x, bits))
    assert torch.equal(WAGEUBN.activation(rounded, bits, RANGE), rounded)


@given(x=VALUES, bits=BITS)
def test_weights_saturate_one_step_below_one(x: Tensor, bits: int) -> None:
    step = 2.0 ** (1 - bits)
    assert torch.equal(WAGEUBN.weight(x, bits, dim=0).double(), direct(x, bits).clamp(-1 + step, 1 - step))


@given(
    x=VALUES.filter(lambda x: x.abs().max() > 2.0**-94),
    bits=BITS,
    scale=st.integers(-20, 20),
)
def test_errors_have_two_grids_scaled_by_a_power_of_two(x: Tensor, bits: int, scale: int) -> None:
    # R is the same for both only where log2 does not lie on the edge between two exponents.
    exponent = math.log2(x.abs().max().item())
    if abs(exponent - math.floor(exponent) - 0.5) < 1e-4:
        return
    steps, unit = 2.0 ** (bits - 1), shift(x) / 2 ** (bits - 1)
    q = x.double() / unit
    expected = torch.where(q.abs() < 1, (q * steps).round() / steps, q.round().clamp(1 - steps, steps - 1)) * unit
    rounded = WAGEUBN.gradient(x, bits, axis=BatchAxis())
    torch.testing.assert_close(rounded.double(), expected, rtol=1e-6, atol=0)
    # A power of two changes nothing but the size (while no value becomes subnormal).
    if x[x != 0].abs().min() > 1e-10:
        scaled = WAGEUBN.gradient(x * 2.0**scale, bits, axis=BatchAxis())
        torch.testing.assert_close(scaled, rounded * 2.0**scale, rtol=0, atol=0)


def test_small_errors_survive_where_shift_quantization_alone_would_lose_them() -> None:
    g = torch.tensor([1.0, 0.001, -0.0005])
    rounded = WAGEUBN.gradient(g, 8, axis=BatchAxis())
    assert (rounded != 0).all() and (rounded - g).abs().max() < 0.01
    assert direct(g, 8).tolist()[1:] == [0, 0]


def test_a_weights_gradient_is_brought_to_one_size_and_is_unbiased_there() -> None:
    for scale in (1e-6, 1.0, 1e6):
        w, upstream = torch.zeros(64), torch.randn(64) * scale
        draws = torch.stack([WAGEUBN.weight_gradient(w, upstream, 8) for _ in range(500)]).double()
        assert torch.equal((draws * 2**14).round(), draws * 2**14) and draws.abs().max() <= 127 / 2**14
        unclipped = upstream.double() / shift(upstream) * 128
        inside = unclipped.abs() < 126
        # One level is at most half a level off in one draw: six standard deviations of the mean of 500.
        off = (draws.mean(0) * 2**14 - unclipped)[inside].abs()
        assert (off < 6 * 0.5 / 500**0.5).all()


def test_a_weight_that_stays_float_keeps_its_gradient() -> None:
    for bits in (0, 32):
        grad = WAGEUBN.weight_gradient(torch.randn(6), torch.full((6,), 0.3), bits)
        assert torch.equal(grad, torch.full((6,), 0.3))


def test_activation_gradients_pass_straight_through() -> None:
    x = torch.tensor([-3.0, 0.2, 3.0])
    assert WAGEUBN.activation_gradient(x, torch.ones(3), 3).tolist() == [1, 1, 1]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_value_is_never_hidden(bad: float) -> None:
    x = torch.tensor([[0.5, bad], [0.5, 1.0]])
    assert not WAGEUBN.activation(x, 4, RANGE)[0, 1].isfinite()
    assert not WAGEUBN.weight(x, 4, dim=0)[0, 1].isfinite()
    assert not WAGEUBN.gradient(x, 4, axis=BatchAxis())[0, 1].isfinite()
    assert not WAGEUBN.weight_gradient(torch.zeros(2, 2), x, 4)[0, 1].isfinite()
