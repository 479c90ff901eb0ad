"""One layer that torchao computes: types, shapes and devices."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fractrain_fx.errors import ConfigError
from fractrain_fx.execution import torchao_devices as torchao_device
from fractrain_fx.execution.backends import torchao as swapped
from fractrain_fx.execution.backends.torchao import TorchaoLinear
from fractrain_fx.formats.microscaling import fake_quantize
from tests.swapping import KINDS, place

_CPU, _GPU = torch.device("cpu"), torch.device("cuda")


def _layer(kind: str) -> tuple[TorchaoLinear, Tensor, Tensor]:
    torch.manual_seed(0)
    device = place(kind)
    weight = torch.randn(48, 32, device=device, requires_grad=True)
    bias = torch.randn(48, device=device, requires_grad=True)
    return TorchaoLinear(kind, 32, 48, True), weight, bias  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(32,), (1, 32), (5, 32), (2, 3, 7, 32)])
def test_any_number_of_rows_is_near_the_float_layer(kind: str, shape: tuple[int, ...]) -> None:
    layer, weight, bias = _layer(kind)
    x = torch.randn(shape, device=weight.device, requires_grad=True)
    out, wanted = layer(x, weight, bias), F.linear(x, weight, bias)
    g = torch.randn_like(out)
    ours = torch.autograd.grad(out, (x, weight, bias), g)
    for each, theirs in zip((out, *ours), (wanted, *torch.autograd.grad(wanted, (x, weight, bias), g)), strict=True):
        # float8 has 3 bits behind the point, 2 in gradients: an error of up to 1/8 of a value, less in sums.
        assert each.shape == theirs.shape and (each - theirs).norm() < 0.1 * theirs.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_gives_gradients_of_zero(kind: str) -> None:
    layer, weight, bias = _layer(kind)
    x = torch.zeros(0, 4, 32, device=weight.device, requires_grad=True)
    out = layer(x, weight, bias)
    out.sum().backward()
    assert out.shape == (0, 4, 48) and x.grad is not None and x.grad.shape == x.shape
    assert weight.grad is not None and not weight.grad.any() and bias.grad is not None and not bias.grad.any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_bias_learns_though_the_weight_is_frozen(kind: str) -> None:
    layer, weight, bias = _layer(kind)
    layer(torch.randn(2, 5, 32, device=weight.device), weight.detach(), bias).sum().backward()
    assert bias.grad is not None and torch.equal(bias.grad, torch.full_like(bias, 10.0))


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_gives_a_half_type_and_gradients_in_the_type_of_parameters(kind: str) -> None:
    layer, weight, bias = _layer(kind)
    x = torch.randn(4, 32, device=weight.device, requires_grad=True)
    with torch.autocast(x.device.type, torch.bfloat16):
        out = layer(x, weight, bias)
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert all(each.grad is not None and each.grad.dtype == torch.float32 for each in (x, weight, bias))
    half = layer(x.bfloat16(), weight.bfloat16(), bias.bfloat16())
    assert half.dtype == torch.bfloat16 and (half - out).norm() < 0.02 * out.norm()


def test_float8_of_float64_is_refused() -> None:
    layer, weight, bias = _layer("float8")
    with pytest.raises(ConfigError, match=r"write model.float\(\)"):
        layer(torch.randn(4, 32).to(weight).double(), weight.double(), bias.double())


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_that_cannot_is_an_error_at_the_first_call(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, weight, bias = _layer(kind)
    monkeypatch.setattr(swapped, "refusal", lambda kind, device: "no such units: take another GPU")
    with pytest.raises(ConfigError, match=f"execution='{kind}' cannot run here: no such units: take another GPU, or"):
        layer(torch.randn(4, 32).to(weight), weight, bias)


def test_what_a_device_can_is_told_by_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = torchao_device.refusal
    assert "device of type mps" in str(refusal("int8", torch.device("mps")))
    assert refusal("float8", torch.device("meta")) is None
    for triton in (True, False):
        monkeypatch.setattr(torchao_device, "has_triton", lambda triton=triton: triton)
        assert (refusal("int8", _CPU) is not None) == triton
        assert (refusal("int8", _GPU) is None) == triton
        assert refusal("float8", _CPU) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    for capability in ((8, 0), (8, 9), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, each=capability: each)
        assert (refusal("float8", _GPU) is None) == (capability >= (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "A100 cannot multiply float8" in str(refusal("float8", _GPU))


@pytest.mark.parametrize("rows", [64, 50])
def test_mxfp8_gives_the_numbers_of_format_mx_where_torchao_emulates_it(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchao.prototype.moe_training.mxfp8_linear")
    monkeypatch.setattr(swapped, "_mxfp8", partial(swapped._mxfp8, emulated=True))
    monkeypatch.setattr(swapped, "refusal", lambda kind, device: None)
    layer, mx8 = TorchaoLinear("mxfp8", 96, 64, True), partial(fake_quantize, element="e4m3")
    x, g = torch.randn(rows, 96, requires_grad=True), torch.randn(rows, 64)
    weight, bias = torch.randn(64, 96, requires_grad=True), torch.randn(64, requires_grad=True)
    out = layer(x, weight, bias)
    of_x, of_weight, of_bias = torch.autograd.grad(out, (x, weight, bias), g)
    assert torch.equal(out, mx8(x) @ mx8(weight).t() + bias)
    assert torch.allclose(of_x, mx8(g) @ mx8(weight, axis=0), atol=1e-5)
    assert torch.allclose(of_weight, mx8(g, axis=0).t() @ mx8(x, axis=0), atol=1e-4)
    assert torch.allclose(of_bias, g.sum(0), atol=1e-5)


def test_mxfp8_needs_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = torchao_device.refusal
    assert "on GPUs only, and the model is on a CPU: write model.to('cuda')" in str(refusal("mxfp8", _CPU))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    for capability in ((9, 0), (10, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, each=capability: each)
        found = refusal("mxfp8", _GPU)
        assert (found is None) == (capability >= (10, 0))
        assert found is None or "H100 cannot multiply MXFP8, which needs compute capability 10.0" in found


def test_where_it_saves_no_time_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    assert "VNNI" in str(torchao_device.slow("int8", _CPU))
    assert "in other types" in str(torchao_device.slow("float8", _CPU))
    assert torchao_device.slow("float8", _GPU) is None
