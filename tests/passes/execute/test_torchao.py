"""Linear layers that torchao computes: its own numbers on our graph, and every other op says why it stays."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from fractrain_fx import FracModel, Pin, Precision, plan, summarize
from fractrain_fx.config.products import PRODUCTS
from fractrain_fx.errors import ConfigError, ModelError
from fractrain_fx.execution.torchao_kernels import Kernel, Kind
from fractrain_fx.passes import not_on_torchao
from tests.build import rewritten
from tests.swapping import KINDS, place, settings


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


def _made(kind: Kind, model: nn.Module | None = None, x: Tensor | None = None, **options: Any) -> FracModel:
    x = torch.randn(4, 6, 32) if x is None else x
    model = _Net() if model is None else model
    return rewritten(model.to(x.device), x, config=settings(kind, **options))


def _converted(kind: Kind, model: nn.Module, names: set[str]) -> nn.Module:
    """The float model with some layers turned by torchao's own functions."""

    def chosen(module: nn.Module, name: str) -> bool:
        return name in names

    model = copy.deepcopy(model)
    if kind == "float8":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig(pad_inner_dim=True)
        return convert_to_float8_training(model, module_filter_fn=chosen, config=config)
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
def test_outputs_and_gradients_are_those_of_a_model_that_torchao_turned(kind: Kind) -> None:
    torch.manual_seed(0)
    net, x = _Net(), torch.randn(5, 7, 32, device=place(kind))
    model = _made(kind, net, x)
    assert model.kernels() == dict.fromkeys(_layers(), str(Kernel(kind, "", "")))
    reference = _converted(kind, net, set(_layers()))
    for name in _layers():
        reference.set_submodule(name, _InOnePiece(reference.get_submodule(name)))
    (wanted, grads), (out, ours) = _step(reference, x), _step(model, x)
    assert torch.equal(out, wanted) and ours.keys() == grads.keys()
    for name in grads:
        # int8 is scaled by rows and columns in another order where torchao transposes the weight's gradient.
        assert torch.allclose(ours[name], grads[name], rtol=1e-5 if kind == "int8" else 0, atol=1e-6)  # type: ignore[arg-type]
    model.eval(), reference.eval()
    assert torch.equal(model(x), reference(x))


def _layers() -> list[str]:
    return [f"layers.{block}.{side}" for block in (0, 1) for side in ("wide", "narrow")]


@pytest.mark.long
def test_a_vision_transformer_is_its_simulation_where_torchao_emulates() -> None:
    pytest.importorskip("torchao")
    x, found = torch.randn(2, 3, 32, 32), []
    for simulated in (True, False):
        torch.manual_seed(0)
        net = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)
        model = _made("mxfp8", net, x, simulated=simulated)
        found.append(_step(model, x))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])  # type: ignore[arg-type]
    kernels = list(model.kernels().values())
    assert kernels.count("multiplies two activations") == 4
    assert sum(each.startswith("torchao MXFP8 emulated") for each in kernels) == 8


def test_the_graph_the_state_and_the_cost_are_the_simulations() -> None:
    net, x = _Net(), torch.randn(4, 6, 32, device=place("float8"))
    simulated, model = _made("float8", copy.deepcopy(net), x, simulated=True), _made("float8", net, x)
    assert model.code == simulated.code
    assert model.state_dict().keys() == simulated.state_dict().keys()
    _step(model, x), _step(simulated, x)
    assert model.cost.cp_total == simulated.cost.cp_total
    simulated.load_state_dict(model.state_dict())  # a checkpoint goes on in the simulation
    assert simulated.eval()(x).isfinite().all()
    assert type(model.restore()) is _Net
    assert torch.equal(_step(copy.deepcopy(model), x)[0], _step(model, x)[0])


def test_every_other_op_stays_simulated_and_says_why() -> None:
    x = torch.randn(2, 3, 4, 4, device=place("float8"))
    pins = (Pin("pinned", Precision(16, 16)), Pin("stem", Precision(8, 8), "affine"))
    model = _made("float8", _Mixed(), x, pins=pins)
    _step(model, x)
    backends = model.backends()
    assert [name for name, found in backends.items() if found.backend == "torchao"] == ["taken", "weight"]
    refused = {name: found.refused["torchao"] for name, found in backends.items() if found.backend != "torchao"}
    assert refused["odd"] == "its weight is 10x16, and fp8 by torchao takes multiples of 16 only"
    assert refused["point"] == "is not a linear layer, and torchao computes only those"
    assert list(refused.values()).count("multiplies two activations") == 2
    assert backends["taken"].products == dict.fromkeys(PRODUCTS, "torchao float8")
    assert not_on_torchao(model.graph_module, model.frac_config) == refused


def test_the_summary_and_the_plan_name_the_numbers_of_each_stage() -> None:
    pytest.importorskip("torchao")
    x = torch.randn(2, 3, 4, 4)
    model = _made("int8", _Mixed(), x, method="pfq", stages="FW(4,8)/BW(4,8)")
    for shown in (model, plan(_Mixed(), config=model.frac_config, example_inputs=(x,))):
        told = " ".join(str(summarize(shown) if shown is model else shown).split())
        assert "quantized ops may be multiplied by torchao" in told
        assert "FW-4/BW-4: all products: simulated: multiplies 4 bits by 4, and torchao 8 by 8" in told
        assert "FW-8/BW-8: all products: torchao int8" in told
        assert "simulated in float: " in told and "multiplies two activations" in told


def test_a_model_without_linear_layers_is_an_error() -> None:
    pytest.importorskip("torchao")
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 4, 1))
    with pytest.raises(ModelError, match="would change nothing: no quantized op of this model is a linear layer"):
        _made("int8", net, torch.randn(2, 3, 8, 8))


def test_without_torchao_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ConfigError, match=r"needs torchao: pip install 'fractrain_fx\[torchao\]'"):
        _made("int8")
