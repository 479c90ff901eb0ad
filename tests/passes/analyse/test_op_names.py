"""An op has one name, and one set of ranges, in the graphs of both modes and all inputs: by its place in the code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph
from torch.nn import functional as F

from fractrain_fx import FracConfig, FracModel, Pin, Precision, RunConfig
from fractrain_fx.nn.ranges import RunningRange
from fractrain_fx.passes import blocks_of, ops_of
from tests.build import rewritten

STATIC = FracConfig("static", precision="FW-8/BW-8", run=RunConfig(backend="plain"))
Body = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Float layers around a body that multiplies in other ways in training, or for other sizes."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.stem, self.m, self.n, self.head = (nn.Linear(8, 8) for _ in range(4))
        self.body, self.extra = body, 0.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self, self.stem(x)))
        return out


def product(y: Tensor) -> Tensor:
    return y @ y.mT


def aux_first(net: Net, y: Tensor) -> Tensor:
    aux = product(y * 100).mean() if net.training else 0.0
    return product(y) @ y + aux * 1e-5


def aux_last(net: Net, y: Tensor) -> Tensor:
    t = y @ y.mT
    aux = ((y * 100) @ (y * 100).mT).mean() if net.training else 0.0
    return t @ y + aux * 1e-5


def on_one_line(net: Net, y: Tensor) -> Tensor:
    return (net.m(y * 100) * 1e-5 if net.training else 0.0) + net.m(y)


def layer_twice(net: Net, y: Tensor) -> Tensor:
    extra = net.m(y * 100).mean() if net.training else 0.0
    return net.m(y) + extra * 1e-5


def another_reader_first(net: Net, y: Tensor) -> Tensor:
    extra = net.n(y).mean() if net.training else 0.0
    return net.m(y) + extra * 1e-5


def in_one_loop(net: Net, y: Tensor) -> Tensor:
    found = [product(v) for v in ((y * 100, y) if net.training else (y,))]
    return found[-1] @ y + (found[0].mean() * 1e-5 if net.training else 0.0)


def twice_on_other_lines(net: Net, y: Tensor) -> Tensor:
    if net.training:
        extra = product(y * 100)
        return product(y) @ y + extra.mean() * 1e-5
    return product(y) @ y


def of_long_inputs(net: Net, y: Tensor) -> Tensor:
    if y.shape[1] > 5:
        s = (y * 100) @ (y * 100).mT
        y = y + s.mean(-1, keepdim=True) * 1e-5
    return (y @ y.mT) @ y


def layer_of_long_inputs(net: Net, y: Tensor) -> Tensor:
    extra = net.m(y * 100).mean() if y.shape[1] > 5 else 0.0
    return net.m(y) + extra * 1e-5


def model_of(body: Body, config: FracConfig = STATIC) -> FracModel:
    torch.manual_seed(0)
    return rewritten(Net(body), torch.randn(2, 8, 8), config=config)


def exact(model: FracModel, x: Tensor) -> Tensor:
    """What the model's own code computes."""
    original: Any = model._state.original
    out: Tensor = type(original).forward(original, x)
    return out


def error(model: FracModel, x: Tensor) -> float:
    """The root mean square of the rounding error, as a share of the exact output."""
    with torch.no_grad():
        rounded, wanted = model(x), exact(model, x)
    return float((rounded - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


def lines(graph: Graph) -> dict[str, str]:
    """By the name of an op, the line that it is on."""
    return {op.name: node.meta["source"] for node, op in ops_of(graph)}


def quantizers(graph: Graph) -> dict[str, list[str]]:
    """By the name of an op, the modules that round its operands."""
    return {op.name: [str(x.target) for x in node.all_input_nodes] for node, op in ops_of(graph) if op.precision.rounds}


def is_within(graph: Graph, other: Graph) -> bool:
    """Whether each op of a graph is an op of the other one, on the same line and with the same quantizers."""
    return lines(graph).items() <= lines(other).items() and quantizers(graph).items() <= quantizers(other).items()


MODES = [aux_first, aux_last, on_one_line, layer_twice, another_reader_first, in_one_loop]


@pytest.mark.parametrize("body", MODES)
def test_each_op_of_evaluation_has_the_ranges_of_its_line_in_training(body: Body) -> None:
    model = model_of(body)
    training, evaluation = model.train().graph_module.graph, model.eval().graph_module.graph
    assert len(lines(evaluation)) < len(lines(training))
    assert is_within(evaluation, training)


@pytest.mark.parametrize("body", [*MODES, twice_on_other_lines])
def test_evaluation_rounds_in_the_ranges_that_training_measured_for_the_same_values(body: Body) -> None:
    model = model_of(body)
    for _ in range(20):
        model.train()(torch.randn(64, 8, 8))
    assert all(bool(each.seen) for each in model.modules() if isinstance(each, RunningRange))
    assert error(model.eval(), torch.randn(64, 4, 8)) < 0.1


@pytest.mark.parametrize("body", [of_long_inputs, layer_of_long_inputs])
def test_each_op_for_other_inputs_has_the_ranges_of_its_line_in_the_first_recording(body: Body) -> None:
    model = model_of(body)
    model(torch.randn(2, 4, 8))
    first, second = (each.recording.train.graph for each in model._state.variants)
    assert len(lines(second)) < len(lines(first))
    assert is_within(second, first)


def by_mode_on_other_lines(net: Net, y: Tensor) -> Tensor:
    scores = y @ y.mT
    if net.training:
        z = F.dropout(scores.softmax(-1), 0.1) @ y
        return net.m(z) + net.n(z)
    return net.m(scores.softmax(-1) @ y)


def test_the_same_computation_on_another_line_has_the_same_ranges() -> None:
    model = model_of(by_mode_on_other_lines)
    training, evaluation = model.train().graph_module.graph, model.eval().graph_module.graph
    assert [*lines(training)] == ["stem", "matmul", "matmul_1", "m", "n", "head"]
    assert [*lines(evaluation)] == ["stem", "matmul", "matmul_1", "m", "head"]
    assert quantizers(evaluation).items() <= quantizers(training).items()


def other_products(net: Net, y: Tensor) -> Tensor:
    if net.training:
        return (y * 100) @ (y * 100).mT @ y
    return y @ y.mT @ y


def test_other_values_on_another_line_have_ranges_of_their_own() -> None:
    model = model_of(other_products)
    training, evaluation = model.train().graph_module.graph, model.eval().graph_module.graph
    assert lines(evaluation).keys() & lines(training).keys() == {"stem", "head"}
    assert error(model, torch.randn(64, 4, 8) / 2) < 0.1


class Strided(nn.Module):
    """A convolution whose stride is another one in evaluation, after code that reads the size of images."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = y.relu() if x.shape[-1] > 8 else y
        y = F.conv2d(y, self.middle.weight) if self.training else F.conv2d(y, self.middle.weight, stride=2)
        out: Tensor = self.last(y)
        return out


@pytest.mark.parametrize("size", [12, 8])
def test_a_convolution_with_another_stride_in_evaluation_keeps_it_for_all_sizes(size: int) -> None:
    model = rewritten(Strided(), torch.randn(2, 3, 12, 12), config=STATIC.replace(precision="FW-32/BW-32"))
    x = torch.randn(2, 3, size, size)
    for training in (True, False):
        model.train(training)
        torch.testing.assert_close(model(x), exact(model, x), rtol=1e-5, atol=1e-5)  # sums in another order


def test_a_rule_may_name_an_op_that_only_training_has() -> None:
    model = model_of(another_reader_first, STATIC.replace(pins=(Pin("n", Precision(4, 4)),)))
    assert {op.name: str(op.precision.precision) for op in model.ops}["n"] == "FW-4/BW-4"
    assert model.eval()(torch.randn(2, 8, 8)).isfinite().all()


def branches(net: Net, y: Tensor) -> Tensor:
    if y.shape[1] > 5:
        y = y + net.n(y.relu())
    y = y + net.m(y.relu())
    return y + net.n(y.relu()) if y.shape[1] <= 5 else y


def test_a_block_for_other_inputs_has_the_gate_of_its_ops() -> None:
    model = model_of(branches, FracConfig("slu", run=RunConfig(backend="plain")))
    model(torch.randn(2, 4, 8))
    graphs = (each.recording.train.graph for each in model._state.variants)
    first, second = ({block.ops: block.name for block in blocks_of(graph) if block.gated} for graph in graphs)
    assert first == second == {("n",): "model", ("m",): "model_1"}
