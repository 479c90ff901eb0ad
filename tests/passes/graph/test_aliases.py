"""Writes reach all readers of the memory that they change: whatever gave the view, and whatever writes."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.nn import functional as F
from torch.overrides import get_testing_overrides, resolve_name

from fractrain_fx import FracConfig, FracModel, RunConfig
from fractrain_fx.capture import RecordedModule, record
from fractrain_fx.capture.trees import tensors_in
from fractrain_fx.execution.blocks.maskless_relu import relu
from fractrain_fx.passes import undispatched
from fractrain_fx.passes.execute.segments import cut
from fractrain_fx.passes.graph.aliases import is_view, memory_of, written
from tests.build import rewritten
from tests.models import thinned

Call = Callable[..., Any]

FLOAT = FracConfig("float")
LAST = FracConfig("static", precision="FW-32/BW-32", run=RunConfig(backend="plain", memory_format="auto"))
SHAPE = (2, 4, 6, 6)
ARGUMENTS: list[tuple[Any, ...]] = [
    *((), (1,), (0, 1), (1, 0, 2), (-1,), (torch.float32,), ("cpu",), ((1,), (0,)), (SHAPE,), ((0, 1, 2, 3),)),
    *((1, (2, 2)), (0.5, False), (torch.ones(SHAPE),)),
]


def first(value: Any) -> Tensor:
    return next(tensors_in(value))


def in_memory_of(x: Tensor, y: Tensor) -> bool:
    return y.layout is torch.strided and y.untyped_storage()._cdata == x.untyped_storage()._cdata


def gives_a_view(call: Call, arguments: tuple[Any, ...]) -> bool:
    """Whether the result of a call lies in its operand's memory, and torch lets a model write to it."""
    x = torch.ones(SHAPE, requires_grad=True) * 1
    try:
        view = first(call(x, *arguments))
        if x._version or not in_memory_of(x, view):
            return False
        view.mul_(2)
        x.sum().backward()
    except Exception:  # other arguments, or a view that torch protects
        return False
    return True


@functools.cache
def views() -> dict[str, tuple[Call, tuple[Any, ...]]]:
    """Every function, method and property of torch that gives a view, with arguments for it."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in get_testing_overrides():
            name = resolve_name(call) or "set"
            if any(part in name for part in ("set", "storage")) or (name.endswith("_") and not name.endswith("__")):
                continue
            fitting = next((each for each in ARGUMENTS if gives_a_view(call, each)), None)
            if fitting is not None:
                found[name] = call, fitting
    return found


class Part(nn.Module):
    """A part without parameters that changes its input and returns nothing."""

    def forward(self, x: Tensor) -> None:
        x[...] = 0.5


def set_values(x: Tensor) -> None:
    x[...] = 0.5


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "method": lambda x: x.mul_(2),
    "index": set_values,
    "several at once": lambda x: torch._foreach_mul_([x], 2.0),
    "by position": lambda x: F.dropout(x, 1.0, True, True),
    "by keyword": lambda x: F.relu(x, inplace=True),
    "out": lambda x: torch.mul(x, 2, out=x),
    "function": Dirty.apply,
}


class Sites(nn.Module):
    """For each view: layer, write to a view of its output, and another layer that reads the output."""

    def __init__(self, write: Callable[[Tensor], Any] | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 1) for _ in range(2 * len(views())))
        self.write, self.part = write, Part()

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        layers = iter(self.layers)
        for call, arguments in views().values():
            y = next(layers)(x)
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.write is not WRITES["out"]):
                (self.write or self.part)(first(call(y, *arguments)))
            outputs.append(next(layers)(y))
        return torch.cat(outputs, 1)


def writes_of(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """The operands that nodes change, each with the layer that ran last."""
    layer = None
    for node in graph.nodes:
        if node.op == "call_function" and "conv2d" in node.name:
            layer = node
        for operand in written(node):
            assert layer is not None
            yield operand, layer


@pytest.mark.parametrize("write", thinned([*WRITES, "part"], 2))
def test_every_write_to_every_view_is_known_to_change_the_tensor(write: str) -> None:
    assert len(views()) > 80
    recorded = record(Sites(WRITES.get(write)), (torch.randn(SHAPE),), check=False)
    for graph in (recorded.train.graph, copy.deepcopy(recorded.eval).graph):
        found = list(writes_of(graph))
        assert {layer for _, layer in found} == {layer for operand, layer in found if layer in memory_of(operand)}
        assert len({layer for _, layer in found}) == len(views())


def running(model: FracModel) -> RecordedModule:
    return model._state.running[True].current()


@pytest.mark.long
def test_an_in_place_relu_of_any_view_still_writes() -> None:
    model = rewritten(Sites(WRITES["by keyword"]), torch.randn(SHAPE), config=FLOAT)
    assert len(running(model).graph.find_nodes(op="call_function", target=F.relu)) == len(views())
    assert not running(model).graph.find_nodes(op="call_function", target=relu)


@pytest.mark.parametrize("write", ["several at once", "part"])
def test_no_segment_begins_between_a_tensor_and_a_write_to_any_view_of_it(write: str) -> None:
    model = rewritten(Sites(WRITES.get(write)), torch.randn(SHAPE), config=FLOAT)
    segments = cut(running(model))
    assert len(segments) > len(views()) / 2
    found = [layer for segment in segments for operand, layer in writes_of(segment.module.graph)]
    assert len(set(found)) == len(views())


class Images(nn.Module):
    """A convolution whose output is read after a write to a view of it."""

    def __init__(self, write: str, view: str) -> None:
        super().__init__()
        self.first, self.middle = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, padding=1)
        self.last, self.head = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 2, 1)
        self.write, self.view, self.part = write, view, Part()
        assert view in views()  # which looks for them, before the model is recorded

    def forward(self, x: Tensor) -> Tensor:
        y = self.middle(self.first(x))
        call, arguments = views()[self.view]
        WRITES.get(self.write, self.part)(first(call(y, *arguments)))
        out: Tensor = self.head(self.last(y))
        return out


def same_as_the_model(net: nn.Module) -> None:
    x = torch.randn(2, 3, 6, 6)
    model = rewritten(copy.deepcopy(net), x, config=LAST)
    outputs = net(x), model(x)
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)  # sums in another order
    for out in outputs:
        out.cos().sum().backward()
    for name, p in net.named_parameters():
        torch.testing.assert_close(p.grad, model.get_parameter(name).grad, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("name", ["torch.Tensor.ravel", "torch.Tensor.unfold", "torch.nn.functional.dropout"])
@pytest.mark.parametrize("write", ["several at once", "by position", "part"])
def test_convolutions_of_images_read_what_was_written_to_a_view(write: str, name: str) -> None:
    same_as_the_model(Images(write, name))


@pytest.mark.long
def test_convolutions_of_images_read_what_was_written_to_any_view() -> None:
    for name in views():
        same_as_the_model(Images("several at once", name))


class Block(Images):
    """A branch that begins before a write to a view of what the skip path carries, and ends behind it."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        branch = self.middle(y)
        call, arguments = views()[self.view]
        WRITES.get(self.write, self.part)(first(call(y, *arguments)))
        out: Tensor = self.head(self.last(y + branch.relu()))
        return out


@pytest.mark.parametrize("name", ["torch.Tensor.ravel", "torch.adjoint"])
@pytest.mark.parametrize("write", ["method", "several at once", "part"])
def test_a_branch_runs_for_all_samples_if_a_write_to_a_view_of_its_input_follows(write: str, name: str) -> None:
    config = FracConfig("slu", run=RunConfig(skipping="left-out"))
    model = rewritten(Block(write, name), torch.randn(2, 3, 6, 6), config=config)
    (reason,) = undispatched(model.graph_module).values()
    assert "in place" in reason


def copies(call: Call, arguments: tuple[Any, ...], x: Tensor) -> bool:
    try:
        return not in_memory_of(x, first(call(x, *arguments)))
    except RuntimeError:  # for this layout or type there is no such view
        return False


def test_calls_that_copy_only_in_some_layouts_and_types_are_taken_for_views_in_all() -> None:
    graph, found = Graph(), set()
    x = torch.ones(SHAPE)
    others = [x.to(memory_format=torch.channels_last), *(x.to(dtype) for dtype in (torch.float64, torch.int64))]
    for name, (call, arguments) in views().items():
        method = name.removeprefix("torch.Tensor.")
        if method.isidentifier() and any(copies(call, arguments, each) for each in others):
            found.add(method)
            assert is_view(graph.call_method(method)), name
    assert {"ravel", "reshape", "contiguous", "float"} <= found


def test_what_a_call_changed_is_still_known_in_copies() -> None:
    recorded = record(Images("several at once", "torch.Tensor.ravel"), (torch.randn(2, 3, 6, 6),), check=False)
    (writer,) = (node for node in recorded.train.graph.nodes if written(node))
    copied = Graph()
    copied.graph_copy(recorded.train.graph, {})
    for graph in (copy.deepcopy(recorded.train).graph, copied):
        (other,) = (node for node in graph.nodes if written(node))
        assert other.name == writer.name
    assert pickle.loads(pickle.dumps(writer.meta["memory"])) == writer.meta["memory"]
