"""Linear layers that torchao computes: its own numbers on our graph, and every other op says why it stays."""

from __future__ import annotations

import copy
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from fractrain_fx import FracConfig, FracModel, Pin, Precision, RunConfig, fractrainify, plan, summarize
from fractrain_fx.errors import ConfigError, ModelError
from fractrain_fx.execution.backends import torchao as swapped
from fractrain_fx.execution.backends.torchao import NUMERICS
from fractrain_fx.passes import not_on_torchao
from tests.swapping import KINDS, place


class _Block(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 2 * width, bias=bias), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        # Transposed, so that rows do not lie in one piece, neither here nor in the gradient.
        mixed = self.wide(self.norm(x).transpose(0, 1)).transpose(0, 1)
        return x + self.narrow(mixed.relu())


class _Net(nn.Module):
    """Residual blocks of linear layers on sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(32, 48), nn.Linear(48, 10)
        self.layers = nn.Sequential(_Block(48, True), _Block(48, False))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.stem(x)).mean(1))


class _Mixed(nn.Module):
    """Contractions that torchao does not compute, and one that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.point = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 1)
        self.taken, self.odd, self.pinned = nn.Linear(16, 16), nn.Linear(16, 10), nn.Linear(10, 16)
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.point(self.stem(x).relu()).flatten(2).mT
        x = self.pinned(self.odd(self.taken(x)))
        x = x @ (x.mT @ x)
        return self.head((x @ self.weight).mean(1))


def _made(kind: str | None, model: nn.Module | None = None, x: Tensor | None = None, **options: Any) -> FracModel:
    config = FracConfig(method="static", run=RunConfig(torchao=kind), **options)  # type: ignore[arg-type]
    x = torch.randn(4, 6, 32) if x is None else x
    model = _Net() if model is None else model
    return fractrainify(model.to(x.device), config=config, example_inputs=(x,), check=False)


def _converted(kind: str, model: nn.Module, names: set[str]) -> nn.Module:
    """The float model with some layers turned by torchao's own functions."""

    def chosen(module: nn.Module, name: str) -> bool:
        return name in names

    model = copy.deepcopy(model)
    if kind == "float8":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig(pad_inner_dim=True)
        return convert_to_float8_training(model, module_filter_fn=chosen, config=config)  # type: ignore[no-any-return]
    from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
    from torchao.quantization import quantize_

    quantize_(model, Int8MixedPrecisionTrainingConfig(module_swap=True), filter_fn=chosen)
    return model


class _InOnePiece(nn.Module):
    """A layer whose input and output gradient lie in one piece, as torchao's int8 layer needs them."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.layer(x.reshape(-1, x.shape[-1]))
        return rows.reshape(*x.shape[:-1], -1)


def _step(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Output, and gradients by name, of what both forms name alike."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = model(x)
    out.square().sum().backward()
    grads = {name.replace(".layer.", "."): p.grad for name, p in model.named_parameters() if "frac." not in name}
    return out.detach(), {**grads, "input": x.grad}


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_a_model_that_torchao_turned(kind: str) -> None:
    torch.manual_seed(0)
    net, x = _Net(), torch.randn(5, 7, 32, device=place(kind))
    model = _made(kind, net, x)
    assert model.kernels() == dict.fromkeys(_layers(), NUMERICS[kind])  # type: ignore[index]
    reference = _converted(kind, net, set(_layers()))
    for name in _layers():
        reference.set_submodule(name, _InOnePiece(reference.get_submodule(name)))
    wanted, grads = _step(reference, x)
    out, ours = _step(model, x)
    assert torch.equal(out, wanted)
    assert ours.keys() == grads.keys() and all(torch.equal(ours[name], grads[name]) for name in grads)  # type: ignore[arg-type]
    model.eval(), reference.eval()
    assert torch.equal(model(x), reference(x))


@pytest.mark.parametrize("kind", KINDS)
def test_a_vision_transformer_is_the_one_that_torchao_turned(kind: str) -> None:
    x = torch.randn(2, 3, 32, 32, device=place(kind))
    torch.manual_seed(0)
    net = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10).to(x.device)
    model = _made(kind, net, x, attention="float")
    assert set(model.kernels().values()) == {NUMERICS[kind]} and len(model.kernels()) == 8  # type: ignore[index]
    reference = _converted(kind, net, set(model.kernels()))
    for name in model.kernels():
        reference.set_submodule(name, _InOnePiece(reference.get_submodule(name)))
    (wanted, grads), (out, ours) = _step(reference, x), _step(model, x)
    assert torch.equal(out, wanted)
    assert ours.keys() == grads.keys() and all(torch.equal(ours[name], grads[name]) for name in grads)  # type: ignore[arg-type]
    quantized = _made(kind, net, x)
    assert sum(reason == "multiplies two activations" for reason in quantized.kernels().values()) == 4


def _layers() -> list[str]:
    return [f"layers.{block}.{side}" for block in (0, 1) for side in ("wide", "narrow")]


@pytest.mark.parametrize("kind", KINDS)
def test_the_graph_the_state_and_the_cost_are_the_simulations(kind: str) -> None:
    net, x = _Net(), torch.randn(4, 6, 32, device=place(kind))
    simulated = _made(None, copy.deepcopy(net), x)
    model = _made(kind, net, x)
    assert model.code == simulated.code
    assert model.state_dict().keys() == simulated.state_dict().keys()
    _step(model, x), _step(simulated, x)
    assert model.cost.cp_total == simulated.cost.cp_total
    ranges = {name: value for name, value in model.state_dict().items() if name.endswith(("range.lo", "range.span"))}
    assert ranges and all(value != 0 for name, value in ranges.items() if name.endswith("span"))
    # A checkpoint goes on in the simulation, which rounds in the ranges that were seen here.
    simulated.load_state_dict(model.state_dict())
    assert simulated.eval()(x).isfinite().all()
    assert type(model.restore()) is _Net and all(p.device == x.device for p in model.parameters())
    assert torch.equal(_step(copy.deepcopy(model), x)[0], _step(model, x)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_training_follows_the_float_model(kind: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 6, 32, device=place(kind))
    net = _Net().to(x.device)
    wanted = _losses(copy.deepcopy(net), x)
    # Not bit for bit: 8 bits in every product. A layer that learnt nothing, or the wrong way, is far from this.
    assert _losses(_made(kind, net, x), x) == pytest.approx(wanted, rel=0.15) and wanted[-1] < 0.2 * wanted[0]


def _losses(model: nn.Module, x: Tensor) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    y = torch.arange(32, device=x.device) % 10
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_every_other_op_stays_simulated_and_says_why() -> None:
    x = torch.randn(2, 3, 4, 4, device=place("int8"))
    pins = (Pin("pinned", Precision(4, 8)),)
    model = _made("int8", _Mixed(), x, pins=pins)
    taken = NUMERICS["int8"]
    kernels = model.kernels()
    assert [name for name, kernel in kernels.items() if kernel == taken] == ["taken", "odd"]
    assert kernels["pinned"] == "is pinned to FW-4/BW-8, and torchao computes at FW-8/BW-8"
    assert kernels["point"] == "is not a linear layer, and torchao computes only those"
    assert list(kernels.values()).count("multiplies two activations") == 2
    assert list(kernels.values()).count(kernels["point"]) == 2
    fused = model._state.running[True].fused
    assert {name for name, op in fused.items() if op.layer is not None} == {"taken", "odd"}
    wide = _made("float8", _Mixed(), x, pins=(Pin("pinned", Precision(8, 8)),))
    assert not_on_torchao(wide.graph_module, wide.frac_config)["odd"] == (
        "its weight is 10x16, and float8 takes multiples of 16 only"
    )
    assert "16x10" in wide.kernels()["pinned"] and wide.kernels()["taken"] == NUMERICS["float8"]
    _step(model, x)


@pytest.mark.parametrize("kind", KINDS)
def test_the_summary_and_the_plan_name_the_numbers(kind: str) -> None:
    pytest.importorskip("torchao")
    x = torch.randn(2, 3, 4, 4)
    model = _made(kind, _Mixed(), x)
    told = " ".join(str(summarize(model)).split())
    counted = {"int8": "3 of 7", "float8": "1 of 7"}[kind]
    assert f"{counted} quantized ops are computed by {NUMERICS[kind]}" in told  # type: ignore[index]
    assert "simulated in float: " in told and "multiplies two activations" in told
    drafted = " ".join(str(plan(_Mixed(), config=model.frac_config, example_inputs=(x,))).split())
    assert f"{counted} quantized ops" in drafted


def test_a_model_without_linear_layers_is_an_error() -> None:
    pytest.importorskip("torchao")
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 4, 1))
    with pytest.raises(ModelError, match="would change nothing: no quantized op of this model is a linear layer"):
        _made("int8", net, torch.randn(2, 3, 8, 8))


@pytest.mark.parametrize("kind", KINDS)
def test_without_torchao_the_error_says_how_to_get_it(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ConfigError, match=rf"run.torchao='{kind}' needs torchao: .*'fractrain_fx\[torchao\]'"):
        _made(kind)


def test_stages_of_other_bits_are_refused() -> None:
    pytest.importorskip("torchao")
    model = _made("int8")
    with pytest.raises(ConfigError, match="computes at FW-8/BW-8, not at FW-4/BW-8"):
        model.set_precision(Precision(4, 8))
    model.set_precision(Precision(8, 8))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_model_has_no_break_and_the_same_numbers(kind: str) -> None:
    torch.manual_seed(0)
    device = place(kind)
    model = _made(kind, x=torch.randn(4, 6, 32, device=device))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for batch in (4, 3, 5):
        x = torch.randn(batch, 6, 32, device=device)
        out, grads = _step(model, x)
        again, of_compiled = _step(compiled, x)  # type: ignore[arg-type]
        assert torch.allclose(out, again, atol=1e-5)  # float sums around the layers may be in another order
        of_compiled = {name.removeprefix("_orig_mod."): grad for name, grad in of_compiled.items()}
        assert all(torch.allclose(grads[name], of_compiled[name], atol=1e-4) for name in grads)  # type: ignore[arg-type]


def _wide_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    widths = (20, 64, 96, 64, 40, 3)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


def test_the_recipe_mxfp8_runs_for_real_with_the_numbers_of_its_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao.prototype.moe_training.mxfp8_linear")
    x, found = torch.randn(10, 20), {}
    config = FracConfig(method="static", format="mx", recipe="mxfp8")
    for kind in (None, "mxfp8"):
        if kind is not None:  # what a Blackwell GPU computes, emulated by torchao
            monkeypatch.setattr(swapped, "_mxfp8", partial(swapped._mxfp8, emulated=True))
            monkeypatch.setattr(swapped, "refusal", lambda kind, device: None)
        model = fractrainify(
            _wide_net(), config=config.replace(**{"run.torchao": kind}), example_inputs=(x,), check=False
        ).train()
        out = model(x)
        out.square().sum().backward()
        found[kind] = [out.detach(), *(parameter.grad for parameter in model.parameters())]
    for simulated, real in zip(*found.values(), strict=True):
        assert torch.allclose(simulated, real, rtol=1e-4, atol=1e-6)
    kernels = model.kernels()
    assert kernels["1"] == kernels["2"] == NUMERICS["mxfp8"]
    assert kernels["3"] == "its weight is 40x64, and mxfp8 takes multiples of 32 only"


def test_without_the_hardware_the_first_call_says_what_is_missing() -> None:
    pytest.importorskip("torchao.prototype.moe_training.mxfp8_linear")
    x = torch.randn(10, 20)
    config = FracConfig(method="static", format="mx", recipe="mxfp8", run=RunConfig(torchao="mxfp8"))
    model = fractrainify(_wide_net(), config=config, example_inputs=(x,), check=False)
    assert "cannot run here: torchao multiplies MXFP8 on GPUs only" in str(summarize(model))
    with pytest.raises(ConfigError, match=r"run\.torchao='mxfp8' cannot run here: torchao multiplies MXFP8 on GPUs"):
        model(x)


def test_format_fp8_runs_on_torchaos_float8() -> None:
    x, found = torch.randn(10, 20), []
    device = place("float8")
    for kind in (None, "float8"):
        config = FracConfig(method="static", format="fp8", run=RunConfig(torchao=kind))  # type: ignore[arg-type]
        model = fractrainify(_wide_net(), config=config, example_inputs=(x,), check=False).to(device)
        found.append(model(x.to(device)).detach())
    assert (found[0] - found[1]).norm() < 0.05 * found[0].norm()
