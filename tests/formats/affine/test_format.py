"""The affine format against its formula (ALGORITHM 2), on ordinary values and on those that break quantizers."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import assume, given
from torch import Tensor

from fractrain_fx.config import AffineConfig
from fractrain_fx.errors import InputError
from fractrain_fx.formats import ValueRange
from fractrain_fx.formats.affine import AffineFormat, fake_quantize, measure
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.kernels.formats import AffineByKernels

values = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40).map(torch.tensor)
some_bits = st.integers(2, 8)


def literal(x: Tensor, bits: int) -> Tensor:
    """The formula as ALGORITHM 2 writes it, term by term."""
    lo = x.min()
    scale = ((x.max() - lo) / (2**bits - 1)).clamp(min=1e-8)
    return ((x - lo) / scale).clamp(0, 2**bits - 1).round() * scale + lo


@given(values, some_bits)
def test_equals_the_formula_term_by_term(x: Tensor, bits: int) -> None:
    assert torch.equal(fake_quantize(x, bits), literal(x, bits))


@given(st.integers(0, 2**32 - 1), st.floats(-3, 3), some_bits)
def test_what_models_run_is_the_formula(seed: int, centre: float, bits: int) -> None:
    x = torch.randn(500, generator=torch.Generator().manual_seed(seed)) + centre
    assert torch.equal(AffineFormat().activation(x, bits, measure(x)), fake_quantize(x, bits))


def test_samples_are_rounded_as_if_alone() -> None:
    x = torch.randn(6, 2, 1 << 14)
    bits = torch.tensor([2, 0, 4, 32, 8, 4]).view(-1, 1, 1)
    lo, span, _ = measure(x)
    together = AffineFormat().activation(x, bits, ValueRange(lo, span, True))
    for width, before, after in zip(bits.flatten().tolist(), x, together, strict=True):
        assert torch.equal(after, AffineFormat().activation(before, width, ValueRange(lo, span, True)))
    outside = AffineFormat().activation(x, bits, ValueRange(lo, span / 2))
    for width, before, after in zip(bits.flatten().tolist(), x, outside, strict=True):
        assert torch.equal(after, fake_quantize(before, width, lo=lo, span=span / 2))
    x[0, 0, 0] = torch.inf
    assert AffineFormat().activation(x, bits, ValueRange(lo, span))[0, 0, 0].isnan()


@pytest.mark.parametrize("bits", range(2, 9))
def test_equals_a_float64_formula_where_float32_is_exact(bits: int) -> None:
    # Integers over a range of 4 * levels: the scale is 4, so that every 2 mod 4 is a tie.
    top = 4 * (2**bits - 1)
    x = np.arange(top + 1, dtype=np.float64)
    by_hand = np.rint(np.clip((x - x.min()) / 4, 0, 2**bits - 1)) * 4 + x.min()
    assert np.array_equal(fake_quantize(torch.tensor(x, dtype=torch.float32), bits).double().numpy(), by_hand)
    assert by_hand[2] == 0 and by_hand[6] == 8, "ties go to the even level"


@given(values, some_bits)
def test_error_is_at_most_half_a_step(x: Tensor, bits: int) -> None:
    scale = max((x.max() - x.min()).item() / (2**bits - 1), 1e-8)
    # Beyond half a step: four float32 roundings of numbers as large as the largest involved.
    roundings = 4 * 2**-23 * (x.abs().max().item() + (x.max() - x.min()).item())
    assert (fake_quantize(x, bits) - x).abs().max().item() <= scale / 2 + roundings


@given(values, some_bits)
def test_order_is_kept_and_levels_are_few(x: Tensor, bits: int) -> None:
    rounded = fake_quantize(x.sort().values, bits)
    assert (rounded.diff() >= 0).all()
    assert rounded.unique().numel() <= 2**bits


@given(values, some_bits)
def test_values_on_the_grid_stay(x: Tensor, bits: int) -> None:
    lo, span, _ = measure(x)
    # Below this a step is finer than float32 resolves beside `lo`, so there is no such grid to stay on.
    assume(span > 1e-3 * x.abs().max() and span > 1e-5)
    once = fake_quantize(x, bits, lo=lo, span=span)
    assert torch.equal(fake_quantize(once, bits, lo=lo, span=span), once)
    noisy = fake_quantize(x, bits, lo=lo, span=span, stochastic=True)
    assert torch.equal(fake_quantize(noisy, bits, lo=lo, span=span), noisy)


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_each_channel_has_its_own_range(dim: int) -> None:
    x = torch.randn(3, 4, 5) * torch.tensor([1e-3, 1.0, 1e3]).view(3, 1, 1)
    alone = torch.stack([fake_quantize(part, 3) for part in x.unbind(dim)], dim)
    assert torch.equal(fake_quantize(x, 3, dim=dim), alone)
    lo, span, _ = measure(x, dim)
    assert torch.equal(fake_quantize(x, 3, dim=dim, lo=lo.flatten(), span=span.flatten()), alone)


def test_each_entry_of_a_vector_can_be_a_channel() -> None:
    x = torch.randn(5)
    assert torch.equal(fake_quantize(x, 2, dim=0), x)


def test_a_given_range_clamps() -> None:
    x = torch.tensor([-9.0, -1.0, 0.1, 1.9, 9.0])
    rounded = fake_quantize(x, 2, lo=torch.tensor(-1.0), span=torch.tensor(3.0))
    assert rounded.tolist() == [-1.0, -1.0, 0.0, 2.0, 2.0]
    assert torch.equal(fake_quantize(x, 2, lo=-1.0, span=3.0), rounded)


def test_bits_of_each_sample_share_one_range() -> None:
    x = torch.randn(5, 3, 4)
    bits = torch.tensor([2, 32, 5, 0, 8])
    lo, span, _ = measure(x)
    rounded = fake_quantize(x, bits.view(5, 1, 1))
    for i, own in enumerate(bits.tolist()):
        assert torch.equal(rounded[i], fake_quantize(x[i], own, lo=lo, span=span))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bits", [0, 32])
def test_no_bits_and_float_bits_change_nothing(dtype: torch.dtype, bits: int) -> None:
    x = torch.tensor([0.1, -0.0, 0.0, torch.nan, torch.inf, -torch.inf, 3e-5, 1.0], dtype=dtype)
    as_integers = x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
    for given_bits in (bits, torch.tensor(bits), torch.full((8,), bits)):
        for stochastic in (False, True):
            kept = fake_quantize(x, given_bits, stochastic=stochastic)
            assert kept.dtype == dtype and torch.equal(kept.view(as_integers.dtype), as_integers)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_computed_in_float32(dtype: torch.dtype) -> None:
    x = (torch.randn(64) * 100).to(dtype)
    assert torch.equal(fake_quantize(x, 6), fake_quantize(x.float(), 6).to(dtype))
    top = torch.finfo(dtype).max
    assert fake_quantize(torch.tensor([-top, 0, top], dtype=dtype), 4).isfinite().all()


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("dim", [None, 0, 1])
def test_an_empty_tensor_stays_empty(dim: int | None, stochastic: bool) -> None:
    for shape in ((0, 3), (3, 0), (0, 0)):
        assert fake_quantize(torch.empty(shape), 4, dim=dim, stochastic=stochastic).shape == shape
        assert all(end.isnan().all() for end in measure(torch.empty(shape), dim)[:2])


@pytest.mark.parametrize("value", [0.0, 1.5, -1.5, 1e-42, 3.4e38, -3.4e38, 1e-8])
@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
@pytest.mark.parametrize("stochastic", [False, True])
def test_a_constant_is_its_own_grid(value: float, shape: tuple[int, ...], stochastic: bool) -> None:
    x = torch.full(shape, value)
    assert torch.equal(fake_quantize(x, 4, stochastic=stochastic), x)


def test_strides_do_not_matter() -> None:
    x = torch.randn(6, 8)
    for view in (x.t(), x[::2, 1::3], x[:1].expand(4, 8), x.view(2, 3, 2, 4).permute(3, 1, 0, 2)):
        assert torch.equal(fake_quantize(view, 3), fake_quantize(view.contiguous(), 3))
        assert torch.equal(fake_quantize(view, 3, dim=1), fake_quantize(view.contiguous(), 3, dim=1))
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert fake_quantize(image, 3).is_contiguous(memory_format=torch.channels_last)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20), some_bits)
def test_finite_values_stay_finite(numbers: list[float], bits: int) -> None:
    x = torch.tensor(numbers)
    lo, span, _ = measure(x)
    for stochastic in (False, True):
        assert fake_quantize(x, bits, stochastic=stochastic).isfinite().all()
        assert fake_quantize(x, bits, lo=lo, span=span, stochastic=stochastic).isfinite().all()
        assert fake_quantize(x, bits, dim=0, stochastic=stochastic).isfinite().all()


def test_a_range_too_wide_for_float32_saturates_at_its_top() -> None:
    top = torch.finfo(torch.float32).max
    rounded = fake_quantize(torch.tensor([-top, -top / 2, top / 2, top]), 8)
    assert rounded.isfinite().all() and (rounded.diff() >= 0).all()
    assert rounded[0] == -top and rounded[1] == pytest.approx(-top / 2, rel=0.01)
    assert rounded[2] == rounded[3]


def test_values_closer_than_the_smallest_scale_fall_on_levels_of_that_scale() -> None:
    x = torch.tensor([0.0, 1e-42, 4e-9, 6e-9, 1.2e-8])
    assert fake_quantize(x, 8).tolist() == pytest.approx([0.0, 0.0, 0.0, 1e-8, 1e-8], rel=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_value_is_never_hidden(bad: float) -> None:
    x = torch.tensor([[0.0, 1.0, 2.0], [0.0, bad, 2.0]])
    assert fake_quantize(x, 4).isnan().all(), "a shared range is lost to all"
    by_row = fake_quantize(x, 4, dim=0)
    assert by_row[0].isfinite().all() and by_row[1].isnan().all()
    in_range = fake_quantize(x, 4, lo=torch.tensor(0.0), span=torch.tensor(2.0))
    assert in_range.isfinite().sum() == 5 and not in_range[1, 1].isfinite()
    assert not all(end.isfinite() for end in measure(x)[:2])


@pytest.mark.parametrize("bits", [3, 32, torch.tensor(3), torch.tensor([[0], [3]])])
@pytest.mark.parametrize("stochastic", [False, True])
def test_the_gradient_passes_straight_through(bits: int | Tensor, stochastic: bool) -> None:
    x = torch.randn(2, 5, requires_grad=True)
    upstream = torch.randn(2, 5)
    half = torch.tensor(0.5)
    for lo, span in ((None, None), (-half, 2 * half)):
        (grad,) = torch.autograd.grad(fake_quantize(x, bits, stochastic=stochastic, lo=lo, span=span), x, upstream)
        assert torch.equal(grad, upstream), "no mask, also outside a given range"


def test_an_empty_tensor_has_a_gradient() -> None:
    x = torch.empty(0, 3, requires_grad=True)
    fake_quantize(x, 4).sum().backward()
    assert x.grad is not None and x.grad.shape == (0, 3)


@pytest.mark.parametrize("bits", [2, 6])
def test_stochastic_rounding_is_unbiased(bits: int) -> None:
    x = torch.cat([torch.tensor([0.0, 1.0]), torch.rand(200)])
    draws = 4000
    rounded = fake_quantize(x.expand(draws, -1), bits, stochastic=True)
    step = 1 / (2**bits - 1)
    # One draw deviates by at most step / 2, so its mean over the draws by step / (2 sqrt(draws)); six of those.
    assert (rounded.mean(0) - x).abs().max() < 6 * step / (2 * math.sqrt(draws))
    assert rounded.min() >= 0 and rounded.max() <= 1 + 1e-6
    assert ((rounded - x).abs() < step * (1 + 1e-5)).all(), "only ever to a neighbouring level"


def test_stochastic_rounding_leaves_the_grid_alone() -> None:
    x = torch.tensor([0.0, 1.0, 2.0, 3.0]).repeat(1000)
    assert torch.equal(fake_quantize(x, 2, stochastic=True), x)


def test_stochastic_rounding_draws_anew_for_each_value() -> None:
    rounded = fake_quantize(torch.cat([torch.tensor([0.0, 3.0]), torch.full((1000,), 1.5)]), 2, stochastic=True)[2:]
    # 1000 fair coins: 500 +- 6 * sqrt(250)
    assert abs((rounded == 2).sum().item() - 500) < 95 and set(rounded.tolist()) == {1.0, 2.0}


@pytest.mark.parametrize("size", [1, 64, 3_000_000], ids=["one value", "few", "more than are drawn ahead"])
def test_stochastic_rounding_follows_the_seed_and_differs_from_call_to_call(size: int) -> None:
    x = torch.linspace(0, 1, size)
    torch.manual_seed(7)
    first, second = (fake_quantize(x, 2, stochastic=True) for _ in range(2))
    torch.manual_seed(7)
    assert torch.equal(fake_quantize(x, 2, stochastic=True), first)
    assert torch.equal(fake_quantize(x, 2, stochastic=True), second)
    assert size == 1 or not torch.equal(first, second)


@pytest.mark.parametrize("size", [1000, 3_000_000])
@pytest.mark.parametrize("bits", [2, 8])
def test_the_noise_of_one_call_is_uniform_and_has_no_pattern(size: int, bits: int) -> None:
    # Always the same place between two levels, in a given range: the share that goes up is that place.
    step = 1 / (2**bits - 1)
    for place in (0.1, 0.5, 0.8):
        up = fake_quantize(torch.full((size,), place * step), bits, lo=0.0, span=1.0, stochastic=True) > step / 2
        share = up.double().mean().item()
        # Six standard deviations of a share of so many draws.
        assert abs(share - place) < 6 * (place * (1 - place) / size) ** 0.5
        centred = up.double() - share
        for lag in (1, 7):
            correlation = (centred[lag:] * centred[:-lag]).mean() / centred.square().mean()
            assert abs(correlation) < 6 / size**0.5


def test_rounding_to_nearest_draws_nothing() -> None:
    x = torch.randn(8)
    before = torch.get_rng_state()
    fake_quantize(x, 3)
    fake_quantize(x, 3, lo=-1.0, span=2.0)
    assert torch.equal(torch.get_rng_state(), before)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(0, 3),
    some_bits,
    st.integers(0, 2**31),
    st.booleans(),
)
def test_every_channel_of_any_shape_is_rounded_as_if_alone(
    shape: list[int], dim: int, bits: int, seed: int, reverse: bool
) -> None:
    dim %= len(shape)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed % 7 - 3)
    x = x.permute(*reversed(range(x.ndim))) if reverse else x  # not contiguous
    rounded = fake_quantize(x, bits, dim=dim)
    for mine, alone in zip(rounded.unbind(dim), x.unbind(dim), strict=True):
        assert torch.equal(mine, fake_quantize(alone, bits))
        scale = max((alone.max() - alone.min()).item() / (2**bits - 1), 1e-8)
        assert (mine - alone).abs().max().item() <= scale / 2 + 8 * 2**-23 * alone.abs().max().item()


@given(st.lists(st.floats(-(2.0**-126), 2.0**-126, width=32), min_size=1, max_size=20), some_bits, st.booleans())
def test_denormals_move_by_half_the_smallest_scale_at_most(numbers: list[float], bits: int, stochastic: bool) -> None:
    x = torch.tensor(numbers)
    rounded = fake_quantize(x, bits, stochastic=stochastic)
    assert rounded.isfinite().all()
    assert (rounded - x).abs().max() <= (1e-8 if stochastic else 0.5e-8)


def test_wrong_arguments_are_named() -> None:
    x = torch.randn(2, 3)
    with pytest.raises(InputError, match="bits=33"):
        fake_quantize(x, 33)
    for bits in (torch.tensor(40), torch.tensor([[-1], [4]])):
        with pytest.raises(InputError, match=r"must lie in 0\.\.32"):
            fake_quantize(x, bits)
    wrong: tuple[Any, ...] = (2.5, True, torch.tensor(4.0), torch.tensor(True))
    for bits in wrong:
        with pytest.raises(InputError, match="bits must be whole numbers from 0 to 32, not "):
            fake_quantize(x, bits)
    with pytest.raises(InputError, match=r"floating-point values, and this tensor holds torch\.int64"):
        fake_quantize(torch.arange(3), 4)
    with pytest.raises(InputError, match=r"dim=2.*shape"):
        fake_quantize(x, 4, dim=2)
    with pytest.raises(InputError, match="both lo and span"):
        fake_quantize(x, 4, lo=torch.tensor(0.0))


ZERO = AffineFormat(AffineConfig(gradient_grid="zero"))


@given(st.integers(0, 2**32 - 1), st.floats(-0.9, 0.9), some_bits)
def test_a_gradient_grid_that_holds_zero_keeps_zeros_and_rounds_the_others_to_a_neighbour(
    seed: int, centre: float, bits: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(400, generator=generator) + centre
    g[::3] = 0
    rounded = ZERO.gradient(g, bits, axis=BatchAxis(), seed=torch.tensor(seed % 1000))
    scale = (g.max() - g.min()) / (2**bits - 1)
    assert (rounded[::3] == 0).all()
    assert ((rounded / scale) - (rounded / scale).round()).abs().max() < 1e-3  # every level is a multiple of the scale
    # By noise a value goes to the level below or above; at an end of the range, where none lies beyond, further.
    assert (rounded - g).abs().max() <= 1.001 * scale
    assert len(rounded.unique()) <= 2**bits


def test_samples_of_several_widths_each_have_a_grid_with_zero() -> None:
    torch.manual_seed(0)
    g = torch.randn(5, 40, 8)
    g[:, ::2] = 0
    bits = torch.tensor([6, 0, 8, 32, 4]).view(-1, 1, 1)
    plain = AffineFormat().gradient(g, bits, axis=BatchAxis(), seed=torch.tensor(3))
    shifted = ZERO.gradient(g, bits, axis=BatchAxis(), seed=torch.tensor(3))
    assert (shifted[:, ::2] == 0).all() and not (plain[[0, 2, 4], ::2] == 0).all()
    assert torch.equal(shifted[[1, 3]], g[[1, 3]])
    kernels = AffineByKernels(AffineConfig(gradient_grid="zero"))
    compiled = kernels.gradient(g, bits, axis=BatchAxis(), seed=torch.tensor(3))
    assert (compiled[:, ::2] == 0).all() and torch.equal(compiled[[1, 3]], g[[1, 3]])
    for width, found in zip(bits.flatten().tolist(), compiled, strict=True):
        if width not in (0, 32):
            scale = (g.max() - g.min()) / (2**width - 1)
            assert ((found / scale) - (found / scale).round()).abs().max() < 1e-3


def test_rounding_to_a_grid_with_zero_is_unbiased_inside_it() -> None:
    g = torch.linspace(-1, 1.3, 24).repeat(20_000, 1)
    rounded = ZERO.gradient(g, 3, axis=BatchAxis(), seed=torch.tensor(0))
    # A level is 0.33 wide, its noise has a deviation below 0.17: of 20,000 the mean is good to 0.0012.
    inside = (g[0] > -0.98) & (g[0] < 1.3 - 0.33 / 2)
    assert (rounded.mean(0) - g[0])[inside].abs().max() < 0.006


def test_bad_gradients_stay_bad_on_a_grid_with_zero() -> None:
    for bad in (torch.nan, torch.inf):
        g = torch.randn(50)
        g[7] = bad
        assert not torch.isfinite(ZERO.gradient(g, 6, axis=BatchAxis(), seed=torch.tensor(0))).any()
    constant = ZERO.gradient(torch.full((9,), 0.25), 6, axis=BatchAxis(), seed=torch.tensor(0))
    torch.testing.assert_close(constant, torch.full((9,), 0.25), rtol=0, atol=1e-7)
    assert (ZERO.gradient(torch.zeros(9), 6, axis=BatchAxis(), seed=torch.tensor(0)) == 0).all()
