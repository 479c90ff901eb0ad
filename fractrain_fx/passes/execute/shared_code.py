"""Segments of equal graphs as modules with one function, which torch's compiler then compiles once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from fractrain_fx.passes.execute.segments import Segment
from fractrain_fx.passes.graph.facts import facts

__all__ = ["SharedCode"]


class SharedCode:
    """Modules that run segments, with the same class wherever segments differ in nothing but their tensors.

    Torch's compiler keeps what it compiled with the function that it compiled. Two segments share a function if their
    graphs are equal, apart from the paths of modules, and if their modules have equal settings and tensors of equal
    shapes. Where torch finds another difference it compiles the function once more.
    """

    def __init__(self) -> None:
        self._classes: dict[tuple[Any, ...], type[nn.Module]] = {}

    def of(self, segment: Segment) -> nn.Module:
        """A module that gives what ``segment.module`` gives, on the same modules and parameters."""
        graph, modules, settings = _canonical(segment)
        code = graph.python_code("self")
        names = tuple(sorted((name, id(value)) for name, value in code.globals.items()))
        shapes = tuple(facts(node).shape for node in segment.inputs)
        key = (code.src, names, shapes, tuple(settings))
        if key not in self._classes:
            number = len(self._classes)
            self._classes[key] = type(f"Segment{number}", (nn.Module,), {"forward": _function(code, number)})
        module = self._classes[key]()
        module.training = segment.module.training
        module._modules.update(modules)
        return module


def _canonical(segment: Segment) -> tuple[Graph, dict[str, nn.Module], list[Any]]:
    """The graph with names that only depend on the order of nodes, its modules by these names, and their settings."""
    graph, values = Graph(), dict[Node, Node]()
    paths: dict[str, str] = {}
    settings: list[Any] = []

    def named(path: str) -> str:
        return paths.setdefault(path, f"module_{len(paths)}")

    for number, node in enumerate(segment.module.graph.nodes):
        target = node.target
        if node.op == "call_module":
            settings += _settings(segment.module.get_submodule(target))
            target = named(target)
        elif node.op == "get_attr":
            owner, _, name = target.rpartition(".")
            settings.append(_shape(getattr(segment.module.get_submodule(owner), name)))
            target = f"{named(owner)}.{name}"
        elif node.op == "placeholder":
            target = f"input_{number}"
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = graph.create_node(node.op, target, args, kwargs, name=f"value_{number}")
    return graph, {name: segment.module.get_submodule(path) for path, name in paths.items()}, settings


def _settings(module: nn.Module) -> Iterator[Any]:
    """Class, settings and shapes of a module and all modules in it.

    An object that prints its address is like no other, so whatever holds one shares no function.
    """
    for part in module.modules():
        yield type(part)
        yield part.extra_repr()
        yield tuple((name, repr(value)) for name, value in sorted(vars(part).items()) if not name.startswith("_"))
        yield tuple((name, _shape(x)) for name, x in itertools.chain(part._parameters.items(), part._buffers.items()))


def _shape(x: Any) -> Any:
    return (x.shape, x.dtype, x.requires_grad) if isinstance(x, Tensor) else repr(x)


def _function(code: Any, number: int) -> FunctionType:
    scope = dict(code.globals)
    compiled = compile(code.src, f"<segment {number}>", "exec")
    assert isinstance(compiled, CodeType)
    exec(compiled, scope)
    function = scope["forward"]
    assert isinstance(function, FunctionType)
    return function
