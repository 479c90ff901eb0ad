"""Costs of calls whose sizes are not the example's: those of a model that was recorded at these sizes."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fractrain_fx import Engine, FracConfig, FracModel, Pin
from fractrain_fx.config import AffineConfig, Method
from fractrain_fx.nn.cost import CostMeter
from fractrain_fx.zoo.models.transformer import TransformerLM
from tests import build

METHODS: tuple[Method, ...] = ("float", "static", "dfq", "slu")


class Images(nn.Module):
    """Residual blocks of which the second one shrinks, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.cells = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        self.down, self.head = nn.Conv2d(4, 4, 2, stride=2), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.cells:
            x = self.down(x + block(x).relu())
        return self.head(x.mean((2, 3)))


class Places(nn.Module):
    """Makes tensors of its own: places of tokens, a mask, and a table that it holds without registering it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 8), nn.Embedding(32, 8)
        self.table = torch.randn(32, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        y = self.words(x) + self.places(place) + self.table[: x.shape[1]]
        mask = torch.ones(x.shape[1], x.shape[1]).tril() == 0
        for layer in self.layers:
            y = y + (y @ layer(y).transpose(1, 2)).masked_fill(mask, 0.0) @ y
        return y


class Recurrent(nn.Module):
    """A recurrent layer, and each token's own expert."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.steps = nn.Embedding(50, 8), nn.LSTM(8, 8, batch_first=True)
        self.layers, self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.steps(self.words(x))
        for layer in self.layers:
            y = y + layer(y)
        ends = (x.reshape(1, -1) % 4 == torch.arange(4)[:, None]).sum(1).cumsum(0).to(torch.int32)
        return F.grouped_mm(y.flatten(0, 1), self.experts, offs=ends).view_as(y)


class Regions(nn.Module):
    """Layers under autocast, and attention by one kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(50, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.words(x)
        for layer in self.layers:
            with torch.autocast("cpu", torch.bfloat16):
                z = layer(y).sigmoid()
            with sdpa_kernel(SDPBackend.MATH):
                y = y + F.scaled_dot_product_attention(y, z.to(y.dtype), y)
        return y


def images(samples: int, size: int) -> Tensor:
    return torch.randn(samples, 3, size, size)


def tokens(samples: int, size: int) -> Tensor:
    return torch.randint(0, 50, (samples, size))


def text() -> nn.Module:
    return TransformerLM(50, width=16, hidden=32, layers=2, heads=2, dropout=0.0)


def meter(model: FracModel) -> CostMeter:
    path = next(str(node.target) for node in model.graph.nodes if "cost" in node.name)
    found = model.graph_module.get_submodule(path)
    assert isinstance(found, CostMeter)
    return found


def same_costs(model: FracModel, other: FracModel) -> bool:
    pairs = zip(meter(model).named_buffers(), meter(other).named_buffers(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("net", "batch"),
    [(Images(), images), (text(), tokens), (Places(), tokens), (Recurrent(), tokens), (Regions(), tokens)],
    ids=["images", "text", "places", "recurrent", "regions"],
)
def test_each_call_costs_what_a_model_recorded_at_its_sizes_does(net: nn.Module, batch: Any, method: Method) -> None:
    config = build.paper(method)
    model = build.rewritten(copy.deepcopy(net), batch(2, 8), config=config)
    for samples, size in ((3, 16), (2, 8), (1, 12)):
        other = build.rewritten(copy.deepcopy(net), batch(2, size), config=config)
        x = batch(samples, size)
        model(x)
        assert same_costs(model, other)
        assert (float(model.cost.macs) > float(model.training_macs)) == (size > 8)
        for each in (model.eval(), other.eval()):
            each(x)
        assert float(model.cost.macs) == float(other.cost.macs)
        model.train()


@pytest.mark.parametrize(
    "settings",
    [
        {"format": "mx"},
        {"format": "nvfp4", "precision": "4/4"},
        {"format": "fp8"},
        {"affine": AffineConfig(ranges="row")},
    ],
    ids=["mx", "nvfp4", "fp8", "rows"],
)
@pytest.mark.parametrize(
    ("net", "batch"),
    [(Images(), images), (Places(), tokens), (Recurrent(), tokens)],
    ids=["images", "places", "experts"],
)
def test_formats_that_round_for_each_product_are_counted_too(net: nn.Module, batch: Any, settings: Any) -> None:
    config = FracConfig(**{"method": "static", "precision": "8/8"} | settings)
    model, other = (build.rewritten(copy.deepcopy(net), batch(2, size), config=config) for size in (8, 16))
    model(batch(3, 16))
    assert same_costs(model, other) and float(model.cost.macs) > float(model.training_macs)


def test_the_ledger_sums_what_each_batch_costs() -> None:
    model = build.rewritten(text(), tokens(2, 8), config=build.paper("static"))
    engine, spent = Engine(model), 0.0
    for samples, size in ((3, 16), (2, 8), (5, 12)):
        engine.loss(model(tokens(samples, size)).square().mean()).backward()
        spent += samples * float(model.cost.macs * model.cost.cp_total)
    engine.end_epoch()
    (row,) = engine.ledger.rows
    assert spent == pytest.approx(engine.ledger.total_macs, rel=1e-5)
    assert spent == pytest.approx(row.cp_total * row.relative_macs * model.training_macs * 10, rel=1e-5)
    assert row.relative_macs > 1 and engine.ledger.mean_cp_total == pytest.approx(row.cp_total)


class Attention(nn.Module):
    """Attention, whose share of the MACs grows with the length, before a float head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.words(x)
        for layer in self.layers:
            y = y + (layer(y) @ y.transpose(1, 2)) @ y
        return self.head(y)


@pytest.mark.parametrize("epochs", [1, 2])
def test_cp_is_a_share_of_the_ops_that_it_is_over_at_every_size(epochs: int) -> None:
    stages = "FW(3,8)/BW(6,8)"
    pins = [Pin("matmul*", stages)] if epochs == 1 else []
    config = FracConfig(method="pfq", stages=stages, schedule="manual", pins=pins)
    model = build.rewritten(Attention(), tokens(2, 8), config=config)
    engine, spent, full = Engine(model, epochs=2), 0.0, 0.0
    for samples, size in ((64, 4), (2, 40)):
        engine.loss(model(tokens(samples, size)).square().mean()).backward()
        full += samples * float(model.cost.steered_macs)
        spent += samples * float(model.cost.steered_macs * model.cost.cp)
        if epochs == 2:
            engine.end_epoch()
    if epochs == 1:
        engine.end_epoch()
    assert engine.ledger.mean_cp == pytest.approx(spent / full, rel=1e-5)
    assert float(model.cost.steered_macs) < float(model.cost.macs)


def test_frozen_parts_have_no_gradients_to_count_at_any_size() -> None:
    model = build.rewritten(Images(), images(2, 8), config=build.paper("dfq"))
    other = build.rewritten(Images(), images(2, 16), config=build.paper("dfq"))
    model(images(2, 16))
    for each in (model, other):
        each.cells.requires_grad_(False)
        each(images(2, 16))
    assert same_costs(model, other)
    model(images(2, 8))
    model(images(2, 16))
    assert same_costs(model, other)


def test_two_forwards_of_different_sizes_may_share_a_backward() -> None:
    model = build.rewritten(Images(), images(2, 8), config=build.paper("dfq"))
    engine = Engine(model)
    losses = [engine.loss(model(images(2, size)).square().mean()) for size in (8, 16)]
    sum(losses, torch.zeros(())).backward()
    assert all(gate.grad is not None for name, gate in model.named_parameters() if ".gates." in name)


def test_sizes_that_inference_mode_saw_first_are_trained_on() -> None:
    model = build.rewritten(Images(), images(2, 8), config=build.paper("dfq"))
    with torch.inference_mode():
        model(images(2, 16))
        model.eval()(images(2, 16))
    Engine(model.train()).loss(model(images(2, 16)).square().mean()).backward()


def test_a_copy_counts_from_the_example_again() -> None:
    model = build.rewritten(text(), tokens(2, 8), config=build.paper("static"))
    model(tokens(2, 16))
    copied = copy.deepcopy(model)
    copied(tokens(2, 8))
    assert float(copied.cost.macs) == pytest.approx(model.training_macs)


def test_sizes_that_need_data_are_counted_as_the_examples_with_one_warning() -> None:
    class ByData(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x).relu()
            return x[x.sum(-1) > 0].mean(0, keepdim=True) + x.mean(0)

    model = build.rewritten(ByData(), torch.randn(2, 6, 4), config=build.paper("static"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in (6, 9, 12):
            model(torch.randn(2, size, 4))
    told = [str(warning.message) for warning in caught if "of other sizes than the example's" in str(warning.message)]
    assert len(told) == 1 and "\n" not in told[0]
    assert float(model.cost.macs) == pytest.approx(model.training_macs)


def test_a_compiled_model_is_counted_at_the_sizes_of_the_call_before() -> None:
    model = build.rewritten(text(), tokens(2, 8), config=build.paper("static"))
    engine, compiled = Engine(model), torch.compile(model, fullgraph=True, backend="aot_eager")
    seen = []
    for size in (8, 16, 16):
        engine.loss(compiled(tokens(3, size)).square().mean()).backward()
        seen.append(float(model.cost.macs))
    assert seen[0] == seen[1] < seen[2]
