"""Compiled kernels against the formula; they round samples of several widths and give the gradient of their choice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fractrain_fx import FracConfig, fractrainify, plan
from fractrain_fx.errors import ConfigError
from fractrain_fx.formats import AffineFormat
from fractrain_fx.formats.affine import fake_quantize, measure
from fractrain_fx.formats.affine_compiled import _gaining, _rounding, gains_compiled, round_compiled
from fractrain_fx.nn.axis import BatchAxis
from tests.residual import Residual

WIDTHS = (0, 3, 4, 6, 16, 32)


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


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed", "strided"])
def test_each_sample_is_rounded_as_the_formula_does_alone(layout: str) -> None:
    x = _samples((6, 8, 16, 32), layout)
    lo, span = measure(x)
    rounded = round_compiled(x, WIDTHS, lo, span, None, None)
    assert rounded is not None
    for sample, width in enumerate(WIDTHS):
        assert torch.equal(rounded[sample], fake_quantize(x[sample], width, lo=lo, span=span)), width


def test_a_format_takes_the_kernel_and_gives_the_same_noise() -> None:
    g = _samples((6, 8, 16, 32), "transposed")
    bits, seed = torch.tensor([0, 4, 6, 8, 16, 32]).view(-1, 1, 1, 1), torch.tensor(7)
    eager, compiled = (AffineFormat(compiled=each).gradient(g, bits, axis=BatchAxis(), seed=seed) for each in (0, 1))
    assert _rounding.cache_info().currsize, "no kernel was compiled"
    span = float(measure(g)[1])
    for sample, width in enumerate(bits.flatten().tolist()):
        step = span / (2**width - 1) if width else 0
        # On a tie, or between two float32 roundings of value and noise, the other level may be the nearest.
        same = torch.isclose(eager[sample], compiled[sample], atol=1e-6 * span, rtol=0)
        assert same.float().mean() > 0.999 and (eager[sample] - compiled[sample]).abs().max() <= 1.01 * step, width


def test_gains_are_the_naive_sums() -> None:
    x, g = _samples((6, 8, 16, 32), "contiguous").flatten(1), torch.randn(6, 8 * 16 * 32)
    lo, span = measure(x)
    found = gains_compiled(x, g, (3, 4, 6), lo, span)
    assert found is not None
    naive = [
        ((fake_quantize(x, bits, lo=lo, span=span).double() - x.double()) * g).sum(1, keepdim=True)
        for bits in (3, 4, 6)
    ]
    scale = (x.norm(dim=1) * g.norm(dim=1)).max()
    assert (found - torch.cat(naive, 1)).abs().max() <= 1e-5 * scale


def test_small_and_other_types_take_the_eager_way() -> None:
    small = torch.randn(6, 10)
    assert round_compiled(small, WIDTHS, *measure(small), None, None) is None
    double = torch.randn(6, 10_000, dtype=torch.float64)
    assert round_compiled(double, WIDTHS, *measure(double), None, None) is None
    assert gains_compiled(double, double, (3, 4), *measure(double)) is None
    bits = torch.tensor(WIDTHS).view(-1, 1)
    lo, span = measure(double)
    assert torch.equal(
        AffineFormat(compiled=True).activation(double, bits, lo=lo, span=span, inside=True),
        AffineFormat().activation(double, bits, lo=lo, span=span, inside=True),
    )


def test_a_bad_value_shows() -> None:
    x = torch.randn(6, 4096)
    x[2, 5] = torch.inf
    lo, span = measure(x)
    rounded = AffineFormat(compiled=True).activation(x, torch.full((6, 1), 4), lo=lo, span=span, inside=True)
    assert not rounded[2].isfinite().any()


def test_other_shapes_compile_nothing_anew() -> None:
    graphs = []
    for columns in (8192, 5000, 6000):
        x = torch.randn(6, columns)
        round_compiled(x, WIDTHS, *measure(x), None, None)
        gains_compiled(x, x.clone(), (3, 4), *measure(x))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs == graphs[:1] * 3


def test_a_dfq_step_is_that_of_the_eager_form() -> None:
    torch.manual_seed(0)
    model, x = Residual(), torch.randn(2048, 6)
    losses, gradients = [], []
    for rounding in ("eager", "compiled"):
        torch.manual_seed(1)
        config = FracConfig(method="dfq", rounding=rounding)  # type: ignore[arg-type]
        rewritten = fractrainify(model, config=config, example_inputs=(x[:2],)).train()
        with torch.enable_grad():
            loss = rewritten(x).square().mean()
            loss.backward()
        losses.append(loss.detach())
        gradients.append({name: p.grad for name, p in rewritten.named_parameters() if p.grad is not None})
    assert torch.isclose(*losses, rtol=1e-4)
    assert gradients[0].keys() == gradients[1].keys()


def test_no_compiler_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config as inductor

    monkeypatch.setattr(inductor.cpp, "cxx", (None, "no-such-compiler"))
    monkeypatch.setattr(inductor, "force_disable_caches", True)
    with pytest.raises(ConfigError, match=r"(?s)needs a C\+\+ compiler.*rounding='eager'"):
        _gaining(17)


def test_the_summary_says_where_it_changes_nothing() -> None:
    config = FracConfig(method="dfq", rounding="compiled")
    for device, noted in (("cpu", False), ("meta", True)):
        with torch.device(device):
            model, x = Residual(), torch.randn(2, 6)
        told = str(plan(model, config=config, example_inputs=(x,)))
        assert ("rounding='compiled' changes nothing here" in told) is noted, device


def test_what_it_would_not_change_is_an_error() -> None:
    for wrong in ({"method": "pfq"}, {"method": "dfq", "format": "dorefa"}):
        with pytest.raises(ConfigError, match="rounding='compiled' changes nothing"):
            FracConfig(rounding="compiled", **wrong)  # type: ignore[arg-type]
