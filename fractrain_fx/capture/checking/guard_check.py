"""Decide from the sizes of a call's tensors, before anything is computed, whether a graph equals its model for it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from fractrain_fx.capture.model_errors import ignored_model_errors, model_errors
from fractrain_fx.capture.recording.ambient import computed_from
from fractrain_fx.capture.recording.regions import NodeByNode
from fractrain_fx.capture.sizes.guards import Guard, InputValues, Size
from fractrain_fx.capture.state import Snapshot
from fractrain_fx.capture.trees import map_copies, tensors_in

__all__ = ["Form", "Guards", "Shapes", "SizesWithoutData", "forms_of", "needed", "shapes_of", "without_data"]

Shapes = tuple[torch.Size, ...]
Form = tuple[tuple[int, ...], torch.dtype]


def shapes_of(values: Any) -> Shapes:
    """The shapes of all tensors of a call, in order. They alone decide which graphs hold for it."""
    return tuple(_without_ragged(x) if x.is_nested else x.shape for x in tensors_in(values))


def _without_ragged(x: Tensor) -> torch.Size:
    """The shape of a nested tensor; its ragged dimension, which is another number in each call, is -1."""
    return torch.Size([size if type(size) is int else -1 for size in x.shape])


def forms_of(values: Any) -> tuple[Form, ...]:
    """Shape and dtype of all tensors of a call, as plain values, for which a compiled call is specialised."""
    sizes = ((_without_ragged(x) if x.is_nested else x.shape, x.dtype) for x in tensors_in(values))
    return tuple((tuple(map(operator.index, shape)), dtype) for shape, dtype in sizes)


class Guards:
    """All conditions under which one graph equals its model.

    Those on sizes are checked once for each set of shapes. Sizes of inputs are read directly. Sizes of other tensors
    come from a run of the part of the graph that makes them: on tensors without data, or with data if values decide
    the sizes.

    Args:
        guards: the sizes that Python code saw while the graph was recorded.
        graph: the recorded graph, before any node was erased.
        values: inputs that must have the recorded values, which every call checks.
    """

    def __init__(self, guards: Iterable[Guard], graph: Graph, values: Iterable[InputValues] = ()) -> None:
        self.values = tuple(values)
        all_guards = tuple(guards)
        nodes = needed(graph, {size.node for guard in all_guards for size in guard.expression.sizes})
        self._graph, moved = _copied(graph, nodes)
        self.guards = tuple(replace(guard, expression=guard.expression.on(moved)) for guard in all_guards)
        self._placeholders: list[Node] = [node for node in self._graph.nodes if node.op == "placeholder"]
        self._broken: dict[Guard, None] = {}
        self._known: dict[tuple[Any, ...], tuple[Guard, ...]] = {}
        self._reads_strides = any(size.read == "stride" for guard in all_guards for size in guard.expression.sizes)

    @property
    def constants(self) -> set[str]:
        """Attributes that the graph reads."""
        return {str(node.target) for node in self._graph.nodes if node.op == "get_attr"}

    def placeholder(self, index: int) -> Node:
        """The node of an input."""
        return self._placeholders[index]

    def add(self, ties: Iterable[Guard]) -> None:
        """Add conditions on sizes of inputs, after the graph was found to differ from its model at other sizes."""
        known = set(map(str, self.guards))
        new = tuple(guard for guard in ties if str(guard) not in known)
        self._broken |= dict.fromkeys(new)
        self.guards += new
        self._known.clear()

    def failed_guard(self, values: Sequence[Any], owner: nn.Module, model: nn.Module) -> Guard | InputValues | None:
        """The first guard that does not hold for a call; ``None`` if the graph equals its model.

        ``owner`` has the modules and parameters that the graph's nodes name. The model is not changed.
        """
        for expected in self.values:
            if not expected.holds(values[expected.index]):
                return expected
        if not self.guards:
            return None
        form: tuple[Any, ...] = shapes_of(values)
        if self._reads_strides:
            form += tuple(x.stride() for x in tensors_in(values))
        if form not in self._known:
            self._known[form] = self._failing(values, owner, model)
            self._broken |= dict.fromkeys(self._known[form])
        return next(iter(self._known[form]), None)

    @property
    def all(self) -> tuple[Guard | InputValues, ...]:
        """All conditions."""
        return (*self.values, *self.guards)

    @property
    def ties(self) -> list[Guard | InputValues]:
        """The conditions that did not hold for some call so far, those of :meth:`add`, and those on values."""
        return [*self.values, *self._broken]

    def _failing(self, values: Sequence[Any], owner: nn.Module, model: nn.Module) -> tuple[Guard, ...]:
        wanted = {size for guard in self.guards for size in guard.expression.sizes}
        sizes = _read(wanted, lambda node: self._given(node, values))
        known = (guard for guard in self.guards if guard.expression.sizes <= sizes.keys())
        failing = tuple(guard for guard in known if not guard.holds(sizes))
        rest = wanted - sizes.keys()
        if failing or not rest:
            return failing
        sizes |= self._inner(rest, values, owner, model)
        return tuple(guard for guard in self.guards if not guard.holds(sizes))

    def _given(self, node: Node, values: Sequence[Any]) -> Any:
        """The value of a node, if it is an input or a part of one."""
        if node.op == "placeholder":
            return values[self._placeholders.index(node)]
        if node.target is operator.getitem and isinstance(node.args[0], Node):
            container = self._given(node.args[0], values)
            if isinstance(container, (Mapping, list, tuple)) and not isinstance(node.args[1], Node):
                return container[node.args[1]]  # type: ignore[index]
        return None

    def _inner(self, wanted: set[Size], values: Sequence[Any], owner: nn.Module, model: nn.Module) -> dict[Size, int]:
        run: _Sizes = SizesWithoutData(owner, self._graph, wanted)
        try:
            with Snapshot(model, held=()).preserved(), torch.no_grad():
                run.run(*map_copies(list(values), without_data))
        except model_errors():  # values decide sizes, or foreign code reads them: this needs a run with data
            if any(x.is_meta for x in tensors_in(values)):
                return {}
            run = _Sizes(owner, self._graph, wanted)
            # If the graph does not run with such sizes, the sizes before the error count.
            with Snapshot(model).preserved(), torch.no_grad(), ignored_model_errors():
                run.run(*map_copies(list(values), lambda x: x.detach().clone()))
        return run.sizes


def _read(wanted: Iterable[Size], value_of: Callable[[Node], Any]) -> dict[Size, int]:
    """The wanted sizes of tensors that are known."""
    values = ((size, value_of(size.node)) for size in wanted)
    tensors = ((size, value) for size, value in values if isinstance(value, Tensor) and size.dim < value.ndim)
    return {size: getattr(value, size.read)(size.dim) for size, value in tensors}


class _Sizes(NodeByNode):
    """Runs a graph and reads sizes of some of its tensors."""

    def __init__(self, owner: nn.Module, graph: Graph, wanted: set[Size]) -> None:
        super().__init__(owner, graph=graph)
        self.extra_traceback = False
        self.sizes: dict[Size, int] = {}
        self._wanted: dict[Node, list[Size]] = {}
        for size in wanted:
            self._wanted.setdefault(size.node, []).append(size)

    def run_node(self, n: Node) -> Any:
        """Read the wanted sizes of a node's value."""
        value = super().run_node(n)
        self.sizes |= _read(self._wanted.get(n, ()), lambda _: value)
        return value


class SizesWithoutData(_Sizes):
    """The same on the meta device, with parameters and buffers replaced by tensors without data."""

    def fetch_attr(self, target: str) -> Any:
        """A parameter or buffer without its data; modules as they are."""
        value = super().fetch_attr(target)
        if not isinstance(value, Tensor) and hasattr(type(value), "__torch_function__"):
            return torch.empty(value.shape, dtype=value.dtype, device="meta")  # another form of a parameter
        return without_data(value) if isinstance(value, Tensor) else value

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module with such parameters; its own are not read or written."""
        module = self.fetch_attr(target)
        # Each place once: a module with two names would keep the tensors that are put there for the call.
        places = (
            (f"{path}.{name}".lstrip("."), x)
            for path, part in module.named_modules()
            for name, x in (*part._parameters.items(), *part._buffers.items())
        )
        state = {name: without_data(x) for name, x in places if x is not None}
        return torch.func.functional_call(module, state, args, kwargs, tie_weights=False)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function, or give the form of its result if the meta device refuses the call."""
        name = getattr(target, "__name__", "")
        # Before 2.15 torch refuses products of experts in float32 on the meta device, and computes them on a CPU.
        if name in ("_grouped_mm", "grouped_mm") and [x.ndim for x in args[:2]] == [2, 3]:
            return args[0].new_empty((len(args[0]), args[1].shape[2]))
        return super().call_function(target, args, kwargs)


def without_data(x: Tensor) -> Tensor:
    """A tensor of the same form on the meta device."""
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")


def needed(graph: Graph, wanted: set[Node]) -> dict[Node, None]:
    """The wanted nodes, the nodes they are computed from, and the nodes that write to any of these."""
    nodes = computed_from(wanted)
    while writers := [
        node
        for node in graph.nodes
        if node.meta.get("effect") and node not in nodes and not nodes.keys().isdisjoint(node.all_input_nodes)
    ]:
        nodes |= computed_from(writers)
    return nodes


def _copied(graph: Graph, nodes: Collection[Node]) -> tuple[Graph, dict[Node, Node]]:
    copy, moved = Graph(), dict[Node, Node]()
    of: Callable[[Node], Node] = moved.__getitem__
    for node in graph.nodes:
        if node in nodes or node.op == "placeholder":
            moved[node] = copy.node_copy(node, of)
    copy.output(None)
    return copy, moved
