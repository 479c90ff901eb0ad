"""The graph that runs gives the numbers of the graph that is shown, and keeps less."""

from __future__ import annotations

import copy
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fractrain_fx import FracConfig, FracModel, GateConfig, Precision, RunConfig, fractrainify
from fractrain_fx.config import Backend, GateGradient
from fractrain_fx.formats.affine import format as plain
from fractrain_fx.kernels import affine as kernels
from fractrain_fx.passes import facts, unfused
from tests.build import objective
from tests.everything import rewritten
from tests.models import build

FORMATS = [("affine", "plain"), ("affine", "cpu"), ("dorefa", "plain")]


def step(model: FracModel, x: Tensor, *, shown: bool) -> dict[str, Tensor]:
    """Output, gradients and buffers after one training step from the same state and seed."""
    twin = copy.deepcopy(model)
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    out = twin.graph_module(x)[0] if shown else twin(x)
    cost = twin.graph_module(x)[1].cp if shown else twin.cost.cp
    (out.square().sum() + (0 if shown else 0 * cost)).backward()
    found = {"out": out.detach(), "x": x.grad}
    return found | {n: p.grad for n, p in twin.named_parameters() if p.grad is not None} | dict(twin.named_buffers())


@pytest.mark.parametrize("method", ["static", "pfq"])
@pytest.mark.parametrize(("fmt", "backend"), FORMATS)
def test_scheduled_ops_give_the_same_numbers_noise_included(method: str, fmt: str, backend: Backend) -> None:
    torch.manual_seed(1)
    model, x = rewritten(method, format=fmt, run=RunConfig(backend=backend))
    shown, run = step(model, x, shown=True), step(model, x, shown=False)
    assert shown.keys() == run.keys()
    ranges = [name for name in shown if name.endswith((".lo", ".span"))]
    assert ranges or fmt == "dorefa"
    assert torch.equal(shown["out"], run["out"])
    for name in shown.keys() - set(ranges):  # the shown graph ran twice above, and moved its running ranges twice
        # What several ops read gets its gradients in another order, which shows upstream; a level is far more.
        scale = float(shown[name].double().norm())
        torch.testing.assert_close(shown[name], run[name], rtol=0, atol=1e-5 * scale)


class TwoReaders(nn.Module):
    """A block in which two ops read the same values."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.value, self.share, self.head = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        h = x.tanh()
        x = x + self.value(h) * self.share(h).sigmoid()
        return self.head(x)


@pytest.mark.parametrize("gradient", get_args(GateGradient))
def test_ops_that_read_the_same_values_tell_the_gate_the_same_in_both_graphs(gradient: GateGradient) -> None:
    torch.manual_seed(2)
    x = torch.randn(6, 8)
    config = FracConfig.paper("dfq", gate=GateConfig(gradient=gradient), targets=(3.0,))
    model = fractrainify(TwoReaders(), config=config, example_inputs=(x,), check=False)
    told = []
    for shown in (True, False):
        twin = copy.deepcopy(model).train()
        torch.manual_seed(3)
        out, cost = twin.graph_module(x) if shown else (twin(x), twin.cost)
        (choice,) = cost.choice.values()
        told.append(torch.autograd.grad(out.square().mean(), choice)[0])
    assert told[0][:, 1:].abs().sum() > 0
    torch.testing.assert_close(told[0], told[1], rtol=1e-4, atol=1e-6 * float(told[0].abs().max()))


@pytest.mark.parametrize("backend", ["plain", "cpu"])
def test_gated_ops_give_the_same_numbers_and_the_gates_the_same_gradients(backend: Backend) -> None:
    case = build("vit_tiny_patch16_224")
    config = FracConfig.paper("dfq", run=RunConfig(backend=backend))
    model = fractrainify(case.model, config=config, example_inputs=case.args, check=False)
    results = []
    for shown in (True, False):
        twin = copy.deepcopy(model).train()
        torch.manual_seed(5)
        out = twin.graph_module(*case.args)[0] if shown else twin(*case.args)
        objective(out).backward()
        gradients = {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}
        assert any(n.startswith("frac.controller") for n in gradients)
        results.append((out.detach(), gradients))
    assert torch.equal(results[0][0], results[1][0])
    for name, expected in results[0][1].items():
        # A tensor that several ops read gets its gradients in another order.
        torch.testing.assert_close(
            results[1][1][name], expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max() + 1)
        )


class Heads(nn.Module):
    """Three layers that read one tensor, as queries, keys and values do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.heads = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).tanh()
        a, b, c = (head(x) for head in self.heads)
        return self.last(a * b + c)


@pytest.mark.parametrize("backend", ["plain", "cpu"])
def test_layers_that_read_one_tensor_round_it_once(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 8)
    config = FracConfig(method="static", run=RunConfig(backend=backend))
    model = fractrainify(Heads(), config=config, example_inputs=(x,), check=False)
    expected = step(model, x, shown=True)
    rounded: list[int] = []
    place, name = (kernels, "round_compiled") if backend == "cpu" else (plain, "round_affine")
    original = getattr(place, name)

    def counted(x: Tensor, *args: Any, **options: Any) -> Tensor:
        rounded.extend([1] if x.shape == (4, 8) and not options.get("stochastic") else [])
        return original(x, *args, **options)

    monkeypatch.setattr(place, name, counted)
    found = step(model, x, shown=False)
    # Stem and last layer stay float, so what the heads rounded still lies there in backward.
    assert len(rounded) == 1
    for name in found.keys() - {n for n in found if n.endswith((".lo", ".span"))}:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)


class Written(nn.Module):
    """Writes into a part of what a product gives."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("bpc,dc->bdp", self.stem(x), self.weight)
        y[:, 0].mul_(2)
        return self.head(y.mT + x)


def test_an_op_in_place_may_follow_any_product() -> None:
    x = torch.randn(2, 3, 4)
    model = fractrainify(Written(), config=FracConfig(method="static"), example_inputs=(x,), check=False)
    shown, run = step(model, x, shown=True), step(model, x, shown=False)
    assert torch.equal(shown["weight"], run["weight"]) and run["weight"].any()


class Added(nn.Module):
    """Adds to a product what has its shape; another quantized op's backward comes before that of the addend."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.middle, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        stem = self.stem(x)
        addend = stem.tanh()
        return self.head(torch.addmm(addend, self.middle(stem), self.weight).tanh())


def test_the_gradient_of_an_addend_outlives_the_ops_that_follow() -> None:
    x = torch.randn(5, 4)
    model = fractrainify(Added(), config=FracConfig(method="static"), example_inputs=(x,), check=False)
    shown, run = step(model, x, shown=True), step(model, x, shown=False)
    assert torch.equal(shown["x"], run["x"]) and torch.equal(shown["stem.weight"], run["stem.weight"])


def test_every_family_is_fused_and_what_is_not_says_why() -> None:
    model, _ = rewritten("static")
    running = model._state.running[True].current()
    fused = {facts(node).op.name for node in running.graph.nodes if facts(node).role == "fused"}  # type: ignore[union-attr]
    left = unfused(model.graph_module)
    assert left == {"even": "pads its two sides differently"}
    quantized = {op.name for op in model.ops if op.precision.mode != "float"}
    assert fused == quantized - left.keys() and len(fused) >= 8


def test_the_graph_shown_keeps_its_quantize_nodes_and_a_change_of_it_takes_effect() -> None:
    model, x = rewritten("static")
    assert sum(facts(node).role == "gradient" for node in model.graph.nodes) >= 8
    before = model(x)
    (output,) = model.graph.find_nodes(op="output")
    result, cost = output.args[0]
    with model.graph.inserting_before(output):
        output.args = ((model.graph.call_function(torch.zeros_like, (result,)), cost),)
    assert model(x).any() and before.any()
    model.graph_module.recompile()
    assert not model(x).any()


def test_only_the_operands_are_kept_for_backward() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Conv2d(32, 4, 3))
    x = torch.randn(8, 3, 16, 16)

    def kept(model: nn.Module) -> int:
        storages = {}

        def pack(saved: Tensor) -> Tensor:
            storages[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            out = model(x)
        out.sum().backward()
        return sum(storages.values())

    before = kept(plain)
    model = fractrainify(plain, config=FracConfig(method="pfq"), example_inputs=(x[:2],), check=False)
    assert kept(model) <= 1.1 * before


def test_float_precision_is_the_model_itself() -> None:
    model, x = rewritten("static", precision=Precision(32, 32))
    expected = model.restore()(x)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_products_are_half_and_gradients_come_in_the_types_of_the_parameters(dtype: torch.dtype) -> None:
    model, x = rewritten("dfq")
    with torch.autocast("cpu", dtype=dtype):
        out = model(x)
    assert out.dtype == dtype
    out.float().square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == parameter.dtype, name
        assert parameter.grad.isfinite().all()


def test_a_forward_computed_again_rounds_alike() -> None:
    from torch.utils.checkpoint import checkpoint

    model, x = rewritten("pfq")
    grads = []
    for again in (False, True):
        twin = copy.deepcopy(model)
        torch.manual_seed(1)
        out = checkpoint(twin, x, use_reentrant=False) if again else twin(x)
        out.square().sum().backward()
        grads.append({n: p.grad for n, p in twin.named_parameters() if p.grad is not None})
    for name, expected in grads[0].items():
        assert torch.equal(grads[1][name], expected), name


def test_steps_round_differently_and_a_seed_fixes_them() -> None:
    model, x = rewritten("static")

    def gradient(seed: int) -> Tensor:
        torch.manual_seed(seed)
        model.zero_grad()
        model(x).square().sum().backward()
        assert model.conv.weight.grad is not None
        return model.conv.weight.grad.clone()

    assert torch.equal(gradient(1), gradient(1)) and not torch.equal(gradient(1), gradient(2))
    torch.manual_seed(1)
    model.zero_grad()
    first, second = (F.mse_loss(model(x), torch.zeros(4, 3)) for _ in range(2))
    a, b = (torch.autograd.grad(loss, model.conv.weight)[0] for loss in (first, second))
    assert not torch.equal(a, b)


def test_channels_last_stays() -> None:
    convolution = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 4, 3))
    x = torch.randn(2, 4, 12, 12).contiguous(memory_format=torch.channels_last)
    model = fractrainify(
        convolution.to(memory_format=torch.channels_last), config=FracConfig("static"), example_inputs=(x,), check=False
    )
    assert model(x).is_contiguous(memory_format=torch.channels_last)
