"""The C++ kernels of ``backend="cpu"``: the numbers of the formula, for every layout and for bad values."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor, fx

from fractrain_fx import FracConfig, RunConfig, fractrainify, plan
from fractrain_fx.errors import ConfigError
from fractrain_fx.formats import AffineFormat, ValueRange
from fractrain_fx.formats.affine import fake_quantize, measure
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.formats.noise import hashed
from fractrain_fx.kernels.affine import gains_compiled, has_kernels, measure_compiled, round_compiled
from fractrain_fx.kernels.formats import AffineByKernels
from fractrain_fx.native import kernels
from tests.residual import Residual

WIDTHS = (0, 3, 4, 6, 16, 32)
LAYOUTS = ("contiguous", "channels_last", "transposed", "strided")


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def _samples(shape: tuple[int, ...], layout: str) -> Tensor:
    torch.manual_seed(0)
    match layout:
        case "contiguous":
            return torch.randn(shape)
        case "channels_last":
            return torch.randn(shape).to(memory_format=torch.channels_last)
        case "transposed":
            return torch.randn(shape[0], shape[2], shape[1], shape[3]).transpose(1, 2)
        case _:  # every second value of a larger one
            return torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=70), st.integers(1, 16), st.booleans())
def test_a_rounding_is_the_formula_bit_for_bit(numbers: list[float], bits: int, inside: bool) -> None:
    x = torch.tensor(numbers)
    lo, span, _ = measure(x)
    if not inside:
        lo, span = lo / 2, span / 2
    found = round_compiled(x, torch.tensor(bits), ValueRange(lo, span, inside))
    assert found is not None and torch.equal(found, fake_quantize(x, bits, lo=lo, span=span))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("in_place", [False, True])
def test_each_sample_is_rounded_as_the_formula_does_alone(layout: str, in_place: bool) -> None:
    x = _samples((6, 8, 16, 32), layout)
    lo, span, _ = measure(x)
    bits = torch.tensor(WIDTHS).view(-1, 1, 1, 1)
    rounded = round_compiled(given_x := x.clone(), bits, ValueRange(lo, span, True), out=given_x if in_place else None)
    assert rounded is not None and (rounded is given_x) is in_place
    for sample, width in enumerate(WIDTHS):
        assert torch.equal(rounded[sample], fake_quantize(x[sample], width, lo=lo, span=span)), width


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 1, 3, 2), (1, 0, 2, 3), (3, 2, 1, 0)])
@pytest.mark.parametrize("bits", [(4,), WIDTHS])
def test_results_may_lie_in_another_order(layout: str, order: tuple[int, ...], bits: tuple[int, ...]) -> None:
    x = _samples((6, 8, 16, 32), layout)
    out = torch.empty([x.shape[dim] for dim in order]).permute([order.index(dim) for dim in range(4)])
    lo, span, _ = measure(x)
    widths = torch.tensor(bits).view(-1, 1, 1, 1)
    found = round_compiled(x, widths, ValueRange(lo, span, True), out=out)
    assert found is out and torch.equal(out, fake_quantize(x, widths, lo=lo, span=span))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [0, 1, 3])
def test_each_channel_has_its_own_range(layout: str, dim: int) -> None:
    w = _samples((6, 8, 5, 7), layout)
    for bits in (4, 8):
        assert torch.equal(AffineByKernels().weight(w, bits, dim=dim), fake_quantize(w, bits, dim=dim))


def test_channels_and_samples_may_both_have_their_own() -> None:
    x, bits = torch.randn(4, 6, 10), torch.tensor([3, 0, 8, 32]).view(-1, 1, 1)
    lo, span, _ = measure(x, 1)
    found = round_compiled(x, bits, ValueRange(lo, span, True))
    assert found is not None and torch.equal(found, fake_quantize(x, bits, dim=1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_noise_is_that_of_compiled_graphs(layout: str) -> None:
    g = _samples((6, 8, 16, 32), layout)
    lo, span, _ = measure(g)
    out = torch.empty(g.shape)
    for seed in (0, 7, 1 << 61):
        number = torch.tensor(seed)
        found = round_compiled(g, torch.tensor(6), ValueRange(lo, span, True), stochastic=True, seed=number, out=out)
        scale = span / 63
        noise = hashed(g.numel(), g.new_empty(g.numel()), number)
        # The usual order's, whether channels are innermost or values have gaps; else one for each place in memory.
        noise = noise.as_strided(g.shape, g.stride()) if layout == "transposed" else noise.view(g.shape)
        levels = ((g - lo) / scale + noise).clamp(0, 63).round()
        assert found is not None and torch.equal(found, levels * scale + lo)


@pytest.mark.parametrize("bits", [1, 2, 8])
def test_stochastic_rounding_is_unbiased(bits: int) -> None:
    x = torch.linspace(-1, 1, 101).repeat(2000, 1)
    fmt = AffineByKernels()
    mean = fmt.gradient(x, bits, axis=BatchAxis(), seed=torch.tensor(11)).double().mean(0)
    # Of 2000 draws that differ by a step each, five standard deviations of the mean.
    step = 2 / (2**bits - 1)
    assert (mean - x[0]).abs().max() <= 5 * step / 2 / 2000**0.5
    assert torch.equal(mean[[0, -1]], x[0, [0, -1]].double()), "what lies on the grid stays"


def test_noise_follows_the_seed_and_differs_from_call_to_call() -> None:
    g, fmt = torch.randn(1000), AffineByKernels()
    first, again, other = (fmt.gradient(g, 4, axis=BatchAxis(), seed=torch.tensor(each)) for each in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    torch.manual_seed(0)
    free = [fmt.gradient(g, 4, axis=BatchAxis()) for _ in range(2)]
    torch.manual_seed(0)
    assert torch.equal(free[0], fmt.gradient(g, 4, axis=BatchAxis())) and not torch.equal(*free)


@given(st.lists(st.floats(width=32), min_size=1, max_size=40), st.sampled_from([1, 50, 5000]))
def test_a_range_is_that_of_the_plain_operations(numbers: list[float], repeats: int) -> None:
    x = torch.tensor(numbers).repeat(repeats)  # several blocks, and a last one that no vector fills
    _assert_same(measure_compiled(x, []), measure(x)[:2])
    rows = torch.stack([x, -x])
    _assert_same(AffineByKernels().measure(rows, 0)[:2], measure(rows, 0)[:2])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_range_is_found_in_any_layout(layout: str) -> None:
    x = _samples((6, 8, 16, 32), layout)
    for dim in (None, 0, 1, -1):
        _assert_same(AffineByKernels().measure(x, dim)[:2], measure(x.contiguous(), dim)[:2])


def _assert_same(found: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("columns", [3, 5000])
def test_gains_are_the_naive_sums(inside: bool, columns: int, squared: bool) -> None:
    torch.manual_seed(0)
    x, g = torch.randn(6, columns), torch.randn(6, columns)
    lo, span, _ = measure(x)
    if not inside:
        lo, span = lo / 2, span / 2
    options = (0, 3, 4, 6, 6, 32, 3)
    found = gains_compiled(x, g, options, ValueRange(lo, span, inside), squared=squared)
    assert not found[:, [0, 5]].any(), "nothing is rounded"
    errors = torch.stack([fake_quantize(x, bits, lo=lo, span=span).double() - x.double() for bits in options], 1)
    parts = errors * g.unsqueeze(1)
    naive = (parts**2 if squared else parts).sum(2)
    scale = naive.max() if squared else (x.norm(dim=1) * g.norm(dim=1)).max()
    assert (found - naive).abs().max() <= 1e-5 * scale


@pytest.mark.parametrize("of_x", LAYOUTS)
@pytest.mark.parametrize("of_g", LAYOUTS)
@pytest.mark.parametrize("shape", [(6, 3, 5, 32), (6, 2, 3, 9000)])
def test_gains_of_any_layout(shape: tuple[int, ...], of_x: str, of_g: str) -> None:
    x, g = _samples(shape, of_x), _samples(shape, of_g)
    lo, span, _ = measure(x)
    found = gains_compiled(x, g, (3, 6), ValueRange(lo, span, True))
    wanted = gains_compiled(x.flatten(1).contiguous(), g.flatten(1).contiguous(), (3, 6), ValueRange(lo, span, True))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiled_graphs_call_the_kernel_of_gains(dtype: torch.dtype, squared: bool) -> None:
    called: list[object] = []

    def backend(module: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        called.extend(node.target for node in module.graph.nodes)
        return module.forward

    def run(x: Tensor, g: Tensor) -> Tensor:
        return fmt.activation_gains(x, g, (0, 3, 6, 32), ValueRange(lo, span, True), squared)

    fmt = AffineByKernels()
    x, g = torch.randn(4, 50, dtype=dtype), torch.randn(50, 4, dtype=dtype).t()
    lo, span, _ = measure(x)
    found = torch.compile(run, backend=backend, fullgraph=True)(x, g)
    assert (torch.ops.fractrain_fx.gains in called) == (dtype == torch.float32)
    if dtype == torch.float32:
        assert torch.equal(found, run(x, g))
        gains = torch.ops.fractrain_fx.gains.default
        torch.library.opcheck(
            gains, (x, g, [3, 4], lo, span, True, False, squared), test_utils=("test_schema", "test_faketensor")
        )
    torch.testing.assert_close(found, run(x, g))


@pytest.mark.parametrize("of_g", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("of_x", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("inside", [True, False])
def test_gains_of_half_types_are_those_of_plain_operations(inside: bool, of_x: torch.dtype, of_g: torch.dtype) -> None:
    x, g = torch.randn(6, 5000).to(of_x), torch.randn(6, 5000).to(of_g)
    lo, span, _ = measure(x[:, :50] if not inside else x)
    found, wanted = (
        fmt.activation_gains(x, g, (0, 3, 6, 8), ValueRange(lo, span, inside))
        for fmt in (AffineByKernels(), AffineFormat())
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    if of_x == torch.bfloat16:  # at 8 bits the second rounding is as large as the first
        once = AffineFormat().activation_gains(x.float(), g.float(), (0, 3, 6, 8), ValueRange(lo, span, inside))
        assert (once - found).abs().max() > 0.01


def test_half_types_are_computed_in_float32_and_double_by_plain_operations() -> None:
    fmt, bits = AffineByKernels(), torch.tensor(WIDTHS).view(-1, 1)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        x = torch.randn(6, 100, dtype=dtype)
        lo, span, _ = fmt.activation_range(x)
        assert has_kernels(x) is False and has_kernels(x.float(), lo) is (dtype != torch.float64)
        rounded = fmt.activation(x, bits, ValueRange(lo, span, True))
        assert rounded.dtype == dtype and torch.equal(rounded, fake_quantize(x, bits, lo=lo, span=span))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_value_shows(bad: float) -> None:
    fmt, x = AffineByKernels(), torch.randn(6, 4096)
    given_range = measure(x)
    x[2, 5] = bad
    lo, span, _ = fmt.activation_range(x)
    assert fmt.activation(x, 4, ValueRange(lo, span, True)).isnan().all()
    assert fmt.weight(x, 4, dim=0)[2].isnan().all() and fmt.weight(x, 4, dim=0)[[0, 1, 3, 4, 5]].isfinite().all()
    elsewhere = fmt.activation(x, 4, ValueRange(given_range[0], given_range[1]))
    assert elsewhere.isnan().nonzero().tolist() == [[2, 5]]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 3e38])
def test_a_range_that_kernels_refuse_is_rounded_by_plain_operations(bad: float) -> None:
    x = torch.randn(4, 100)
    x[0, :2] = torch.tensor([bad, -1e38])
    within = measure(x)
    assert round_compiled(x, torch.tensor(4), within) is None
    ours, plain = AffineByKernels(), AffineFormat()
    _assert_same((ours.activation(x, 4, within),), (plain.activation(x, 4, within),))
    _assert_same((ours.weight(x, 4, dim=0),), (plain.weight(x, 4, dim=0),))


@pytest.mark.parametrize("method", ["pfq", "dfq"])
def test_a_step_is_that_of_the_eager_form(method: str) -> None:
    torch.manual_seed(0)
    model, x = Residual(), torch.randn(2048, 6)
    losses, gradients = [], []
    for backend in ("plain", "cpu"):
        torch.manual_seed(1)
        config = FracConfig(method=method, run=RunConfig(backend=backend))  # type: ignore[arg-type]
        rewritten = fractrainify(model, config=config, example_inputs=(x[:2],), check=False).train()
        with torch.enable_grad():
            loss = rewritten(x).square().mean()
            loss.backward()
        losses.append(loss.detach())
        gradients.append({name: p.grad for name, p in rewritten.named_parameters() if p.grad is not None})
    assert torch.isclose(losses[0], losses[1], rtol=1e-4)
    assert gradients[0].keys() == gradients[1].keys()
    for name, grad in gradients[0].items():
        if "gate" not in name:  # the noise of the gradients differs: an eighth is far more than its mean over 2048 rows
            assert (grad - gradients[1][name]).norm() <= 0.125 * grad.norm(), name


@pytest.mark.parametrize("missing", ["compiler", "ninja"])
def test_what_is_missing_to_build_them_is_an_error_that_says_so(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    if missing == "compiler":
        monkeypatch.setenv("CXX", "no-such-compiler")
    else:
        monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(ConfigError, match=r"(?s)needs a C\+\+ compiler.*and ninja.*run.backend='plain'"):
        kernels.__wrapped__()


def test_the_summary_says_where_it_changes_nothing() -> None:
    config = FracConfig(method="dfq", run=RunConfig(backend="cpu"))
    for device, noted in (("cpu", False), ("meta", True)):
        with torch.device(device):
            model, x = Residual(), torch.randn(2, 6)
        told = str(plan(model, config=config, example_inputs=(x,)))
        assert ("run.backend='cpu' changes nothing here" in told) is noted, device


def test_what_it_would_not_change_is_an_error() -> None:
    for wrong in ({"method": "float"}, {"method": "slu"}, {"method": "dfq", "format": "dorefa"}):
        with pytest.raises(ConfigError, match=r"run\.backend='cpu' changes nothing"):
            FracConfig(run=RunConfig(backend="cpu"), **wrong)  # type: ignore[arg-type]
