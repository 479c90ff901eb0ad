"""``fake_quantize`` against torchao's formats and against the definitions, on ordinary and on extreme values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fractrain_fx.errors import InputError
from fractrain_fx.formats.microscaling import ELEMENTS, fake_quantize
from fractrain_fx.formats.microscaling.blocks import BlockLayout, Cut
from fractrain_fx.formats.microscaling.quantize import Scaling, round_blocks
from tests.formats.microscaling.values import tensors

NVFP4: dict[str, Any] = {"element": "e2m1", "block": 16, "scale": "e4m3"}
FORMATS = [*({"element": name} for name in ELEMENTS), NVFP4, {"element": "e4m3", "block": None, "scale": "float32"}]


@pytest.mark.parametrize("x", tensors().values(), ids=tensors())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
class TestEqualsTorchao:
    def test_mx(self, x: Tensor, dtype: torch.dtype) -> None:
        mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
        types = {
            "e2m1": torch.float4_e2m1fn_x2,
            **{"e2m3": "fp6_e2m3", "e3m2": "fp6_e3m2"},
            **{"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2},
        }
        x = x.to(dtype)
        for element, kind in types.items():
            theirs = mx.MXTensor.to_mx(x, kind, 32, mx.ScaleCalculationMode.FLOOR).dequantize(dtype)
            assert torch.equal(fake_quantize(x, element), theirs), element

    def test_nvfp4(self, x: Tensor, dtype: torch.dtype) -> None:
        nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
        x = x.to(dtype)
        scale = nvfp4.per_tensor_amax_to_scale(x.abs().max())
        theirs = nvfp4.NVFP4Tensor.to_nvfp4(x, 16, scale).dequantize(dtype)
        assert torch.equal(fake_quantize(x, **NVFP4), theirs)


def test_equals_the_definition_of_mx_value_by_value() -> None:
    x = torch.randn(3, 40) * torch.tensor([[1.0], [1e-20], [1e20]])
    for row, rounded in zip(x, fake_quantize(x, "e2m1"), strict=True):
        for block, found in ((row[:32], rounded[:32]), (row[32:], rounded[32:])):
            scale = 2.0 ** (math.floor(math.log2(block.abs().max())) - 2)
            grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64) * scale
            for value, got in zip(block.double().tolist(), found.double().tolist(), strict=True):
                assert abs(got) == grid[(grid - abs(value)).abs().argmin()] and got * value >= 0


def test_blocks_lie_along_any_axis_and_the_last_may_be_shorter() -> None:
    x = torch.randn(5, 37, 3)
    found = fake_quantize(x, "e4m3", axis=1, block=16)
    assert torch.equal(found, fake_quantize(x.mT.contiguous(), "e4m3", block=16).mT)
    assert torch.equal(found[:, 32:], fake_quantize(x[:, 32:], "e4m3", axis=1, block=16))
    turned = x.transpose(0, 2)
    assert torch.equal(fake_quantize(turned, "e4m3", axis=1, block=16), found.transpose(0, 2))


def test_a_row_and_a_tensor_may_have_one_scale() -> None:
    x = torch.randn(4, 6) * torch.logspace(0, 3, 4).unsqueeze(1)
    rows = fake_quantize(x, "e4m3", block="row", scale="float32")
    for row, found in zip(x, rows, strict=True):
        assert torch.equal(fake_quantize(row, "e4m3", block=None, scale="float32"), found)
        assert torch.isclose(found.abs().max(), row.abs().max())
    assert not torch.equal(fake_quantize(x, "e4m3", block=None, scale="float32"), rows)


def test_square_blocks_share_a_scale_over_both_dimensions() -> None:
    w = torch.randn(20, 40) * torch.logspace(0, 3, 40)
    grid = ELEMENTS["e2m1"].grid
    found = round_blocks(w, grid, BlockLayout(w.shape, [Cut((0,), 16), Cut((1,), 16)]), Scaling("e8m0"))
    turned = round_blocks(w.t(), grid, BlockLayout(w.t().shape, [Cut((0,), 16), Cut((1,), 16)]), Scaling("e8m0"))
    assert torch.equal(found, turned.t())
    corner = round_blocks(w[16:, 32:], grid, BlockLayout((4, 8), [Cut((0, 1), None)]), Scaling("e8m0"))
    assert torch.equal(found[16:, 32:], corner)


@pytest.mark.parametrize("how", FORMATS, ids=str)
class TestEveryFormat:
    def test_finite_values_stay_finite_and_small_ones_close(self, how: dict[str, Any]) -> None:
        for size in (0.0, 1e-45, 1e-40, 1e-38, 2e-37, 1e-30, 3.4e38, torch.finfo(torch.float32).max):
            x = torch.linspace(-1, 1, 64) * size
            found = fake_quantize(x, **how)
            assert found.isfinite().all()
            if size >= 1e-37:  # the closest scale is within reach: the largest error is half of the last step
                assert ((found - x).abs() <= 0.26 * size).all()
        assert fake_quantize(torch.empty(0, 32), **how).shape == (0, 32)

    def test_what_is_not_finite_makes_nan_of_what_shares_its_scale(self, how: dict[str, Any]) -> None:
        for bad in (math.nan, math.inf, -math.inf):
            x = torch.randn(2, 64)
            x[0, 1] = bad
            found = fake_quantize(x, **how)
            block = how.get("block", 32)
            shared = 64 if block is None or how.get("scale") == "e4m3" else 32
            assert found[0, :shared].isnan().all()
            if shared == 32:
                assert torch.equal(found[1], fake_quantize(x[1], **how)) and found[0, 32:].isfinite().all()

    def test_stochastic_rounding_has_the_right_mean_and_variance(self, how: dict[str, Any]) -> None:
        # The last value fixes the scale; the others do not saturate.
        x = torch.cat([torch.linspace(0.02, 3.9, 15), torch.tensor([4.0])]).repeat(20_000, 1)
        how = {**how, "block": "row"} if how.get("scale") == "float32" else how
        found = fake_quantize(x, stochastic=True, **how)
        grid = found.unique()
        low = grid[torch.searchsorted(grid, x[0], right=True) - 1]
        high = grid[torch.searchsorted(grid, x[0]).clamp(max=len(grid) - 1)]
        variance = (high - x[0]) * (x[0] - low)
        # Five standard errors; one value in 4 million lies outside.
        assert ((found.mean(0) - x[0]).abs() <= 5 * (variance / 20_000).sqrt() + 1e-6).all()
        assert torch.allclose(found.var(0), variance, rtol=0.1, atol=1e-6)

    def test_equal_seeds_give_equal_noise(self, how: dict[str, Any]) -> None:
        x = torch.randn(4, 64)
        grid, cuts = ELEMENTS[str(how["element"])].grid, [Cut((1,), 32)]
        again = [
            round_blocks(x, grid, BlockLayout(x.shape, cuts), Scaling("e8m0"), stochastic=True, seed=torch.tensor(seed))
            for seed in (1, 1, 2)
        ]
        assert torch.equal(again[0], again[1]) and not torch.equal(again[0], again[2])

    def test_runs_on_cuda(self, how: dict[str, Any]) -> None:
        with FakeTensorMode(allow_non_fake_inputs=True):
            x = torch.empty(5, 70, device="cuda")
            assert fake_quantize(x, **how).device.type == "cuda"
            assert fake_quantize(x.half(), **how).dtype == torch.float16


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(ELEMENTS)),
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
)
def test_mx_is_idempotent_and_symmetric_and_follows_powers_of_two(element: str, given_values: list[float]) -> None:
    x = torch.tensor(given_values)
    found = fake_quantize(x, element)
    assert torch.equal(fake_quantize(found, element), found)
    assert torch.equal(fake_quantize(-x, element), -found)
    scaled = x.double() * 0.125  # in double precision nothing is lost, and the scale is in reach
    if x.abs().max() > 1e-30:
        assert torch.equal(fake_quantize(scaled, element), found.double() * 0.125)


def test_gradients_pass_straight_through_and_half_types_stay() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        x = torch.randn(3, 40, dtype=dtype, requires_grad=True)
        y = fake_quantize(x, "e4m3")
        upstream = torch.randn_like(y)
        y.backward(upstream)
        assert y.dtype == dtype and x.grad is not None and torch.equal(x.grad, upstream)


@pytest.mark.long
@pytest.mark.parametrize("how", [FORMATS[0], NVFP4, FORMATS[-1]], ids=str)
def test_compiles_as_one_graph_with_the_same_values(how: dict[str, Any]) -> None:
    compiled: Callable[[Tensor], Tensor] = torch.compile(lambda x: fake_quantize(x, **how), fullgraph=True)
    for x in (torch.randn(4, 70), torch.randn(4, 70) * 1e-30, torch.zeros(4, 70)):
        assert torch.equal(compiled(x), fake_quantize(x, **how))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"element": "e4m4"}, "'e4m4' is unknown: write one of e2m1.* Did you mean 'e4m3'"),
        ({"element": "e4m3", "scale": "e8m1"}, "'e8m1' is unknown"),
        ({"element": "e4m3", "block": 0}, "block=0 must be a number of values"),
        ({"element": "e4m3", "axis": 2}, "axis=2 asks for blocks along it"),
    ],
)
def test_wrong_arguments_are_answered(how: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fake_quantize(torch.randn(2, 32), **how)
    with pytest.raises(InputError, match="floating-point"):
        fake_quantize(torch.ones(2, 32, dtype=torch.int32), "e4m3")


def test_the_mean_of_stochastic_rounding_is_the_value_up_to_the_last_level() -> None:
    """The power of two that is the scale of 32 values puts the largest of them at 4 to 8; e2m1 ends at 6."""
    torch.manual_seed(0)
    x = torch.linspace(-1.0, 1.0, 32) * 7.5
    mean = torch.stack([fake_quantize(x, "e2m1", stochastic=True) for _ in range(4000)]).mean(0)
    # neighbours are at most 2 apart, so that a mean deviates by 1 / sqrt(4000)
    torch.testing.assert_close(mean, x.clamp(-6, 6), atol=5 / math.sqrt(4000), rtol=0)
    assert bool((mean[x.abs() > 6].abs() == 6).all())
