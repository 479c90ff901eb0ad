"""Whether a graph is its model for a call, told from the sizes of the call's tensors before anything is computed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Interpreter, Node
from torch.nn.modules import activation, batchnorm, dropout, normalization
from torch.utils import _pytree as pytree

from fractrain_fx.capture.sizes.guards import Guard, Size
from fractrain_fx.capture.state import Snapshot
from fractrain_fx.capture.trees import tensors_in

__all__ = ["Form", "Guards", "Shapes", "forms_of", "shapes_of"]

Shapes = tuple[torch.Size, ...]
Form = tuple[tuple[int, ...], torch.dtype]


def shapes_of(values: Any) -> Shapes:
    """The shapes of all tensors of a call, in order: on them alone depends which graphs hold for it."""
    return tuple(x.shape for x in tensors_in(values))


def forms_of(values: Any) -> tuple[Form, ...]:
    """Shape and dtype of all tensors of a call, as plain values: a compiled call is compiled for them."""
    return tuple((tuple(map(operator.index, x.shape)), x.dtype) for x in tensors_in(values))


class Guards:
    """All that one graph is tied to.

    A call is looked at once for each set of shapes. Sizes of inputs are read off. Those of other tensors come from a
    run of the part of the graph that makes them, on tensors without data, or with data where values decide them.

    Args:
        guards: what Python code saw while the graph was recorded.
        graph: as it was recorded, before anything was erased.
    """

    def __init__(self, guards: Iterable[Guard], graph: Graph) -> None:
        found = tuple(guards)
        nodes = _needed(graph, {size.node for guard in found for size in guard.expression.sizes})
        self._graph, moved = _copied(graph, nodes)
        self.guards = tuple(replace(guard, expression=guard.expression.on(moved)) for guard in found)
        self._placeholders: list[Node] = [node for node in self._graph.nodes if node.op == "placeholder"]
        self._added: tuple[Guard, ...] = ()
        self._known: dict[Shapes, tuple[Guard, ...]] = {}

    @property
    def constants(self) -> set[str]:
        """Attributes that the graph reads."""
        return {str(node.target) for node in self._graph.nodes if node.op == "get_attr"}

    def placeholder(self, index: int) -> Node:
        """The node of an input."""
        return self._placeholders[index]

    def add(self, ties: Iterable[Guard]) -> None:
        """Tie the graph to more: sizes of inputs at which it was seen to differ from its model elsewhere."""
        known = set(map(str, self.guards))
        new = tuple(guard for guard in ties if str(guard) not in known)
        self._added = (*self.ties, *new)
        self.guards += new
        self._known.clear()

    def broken(self, values: Sequence[Any], owner: nn.Module, model: nn.Module) -> Guard | None:
        """The first guard that does not hold for a call; ``None`` where the graph is its model.

        Args:
            values: what the graph's inputs are given.
            owner: whose modules and parameters the graph's nodes name.
            model: the model that was recorded, which is left as it is.
        """
        if not self.guards:
            return None
        shapes = shapes_of(values)
        if shapes not in self._known:
            self._known[shapes] = self._look(values, owner, model)
        return next(iter(self._known[shapes]), None)

    @property
    def ties(self) -> list[Guard]:
        """The guards that did not hold for some call so far, and those that :meth:`add` added."""
        return list(dict.fromkeys(guard for found in (self._added, *self._known.values()) for guard in found))

    def _look(self, values: Sequence[Any], owner: nn.Module, model: nn.Module) -> tuple[Guard, ...]:
        wanted = {size for guard in self.guards for size in guard.expression.sizes}
        sizes: dict[Size, int] = {}
        for size in wanted:
            value = self._given(size.node, values)
            if isinstance(value, Tensor) and size.dim < value.ndim:
                sizes[size] = getattr(value, size.read)(size.dim)
        known = (guard for guard in self.guards if guard.expression.sizes <= sizes.keys())
        found = tuple(guard for guard in known if not guard.holds(sizes))
        rest = wanted - sizes.keys()
        if found or not rest:
            return found
        sizes |= self._inner(rest, values, owner, model)
        return tuple(guard for guard in self.guards if not _met(guard, sizes))

    def _given(self, node: Node, values: Sequence[Any]) -> Any:
        """What a node stands for, if that can be read off the inputs."""
        if node.op == "placeholder":
            return values[self._placeholders.index(node)]
        if node.target is operator.getitem and isinstance(node.args[0], Node):
            whole = self._given(node.args[0], values)
            if isinstance(whole, (dict, list, tuple)) and not isinstance(node.args[1], Node):
                return whole[node.args[1]]  # type: ignore[index]
        return None

    def _inner(self, wanted: set[Size], values: Sequence[Any], owner: nn.Module, model: nn.Module) -> dict[Size, int]:
        shapes_only = pytree.tree_map_only(Tensor, _without_data, list(values))
        try:
            with Snapshot(model, tensors=False).kept(), torch.no_grad():
                return _SizesWithoutData(owner, self._graph, wanted).found(shapes_only)
        except Exception:  # values decide sizes, or foreign code reads them: only a run with data tells
            if any(x.is_meta for x in tensors_in(values)):
                return {}
        run = _Sizes(owner, self._graph, wanted)
        with Snapshot(model).kept(), torch.no_grad():
            try:
                return run.found(pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), list(values)))
            except Exception:  # the graph does not run with such sizes: what it got to counts
                return run.sizes


class _Sizes(Interpreter):
    """Runs a graph and reads sizes of some of its tensors."""

    def __init__(self, owner: nn.Module, graph: Graph, wanted: set[Size]) -> None:
        super().__init__(owner, graph=graph)
        self.extra_traceback = False
        self.sizes: dict[Size, int] = {}
        self._wanted: dict[Node, list[Size]] = {}
        for size in wanted:
            self._wanted.setdefault(size.node, []).append(size)

    def found(self, values: Sequence[Any]) -> dict[Size, int]:
        """Run; what was read."""
        self.run(*values)
        return self.sizes

    def run_node(self, n: Node) -> Any:
        """Read what is wanted."""
        value = super().run_node(n)
        if isinstance(value, Tensor):
            for size in self._wanted.get(n, ()):
                if size.dim < value.ndim:
                    self.sizes[size] = int(getattr(value, size.read)(size.dim))
        return value


# Their result has the form of their first operand. On the meta device torch computes them in Python, in a millisecond.
_KEEP_FORM = frozenset(
    {"layer_norm", "group_norm", "batch_norm", "instance_norm", "rms_norm", "dropout", "softmax", "log_softmax"}
    | {"gelu", "relu", "relu6", "silu", "mish", "elu", "leaky_relu", "hardswish", "hardsigmoid", "sigmoid", "tanh"}
)
_KEEPING = (activation.__name__, dropout.__name__, normalization.__name__, batchnorm.__name__)
_OTHERS = (nn.MultiheadAttention, nn.GLU)


class _SizesWithoutData(_Sizes):
    """The same on the meta device, where parameters and buffers are replaced as well."""

    def fetch_attr(self, target: str) -> Any:
        """A parameter or buffer without its data; modules as they are."""
        value = super().fetch_attr(target)
        return _without_data(value) if isinstance(value, Tensor) else value

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module on such parameters; none of its own are read or written."""
        module = self.fetch_attr(target)
        if type(module).__module__ in _KEEPING and not isinstance(module, _OTHERS):
            return args[0] if args else kwargs["input"]
        # Each place once: a module that has two names would keep what is put there for the call.
        places = (
            (f"{path}.{name}".lstrip("."), x)
            for path, part in module.named_modules()
            for name, x in (*part._parameters.items(), *part._buffers.items())
        )
        state = {name: _without_data(x) for name, x in places if x is not None}
        return torch.func.functional_call(module, state, args, kwargs, tie_weights=False)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function, or spare it."""
        name = getattr(target, "__name__", "")
        if name in _KEEP_FORM and args:
            return args[0]
        if name == "scaled_dot_product_attention" and len(args) > 2:
            return args[0].new_empty((*args[0].shape[:-1], args[2].shape[-1]))
        return super().call_function(target, args, kwargs)


def _without_data(x: Tensor) -> Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")


def _met(guard: Guard, sizes: dict[Size, int]) -> bool:
    return guard.expression.sizes <= sizes.keys() and guard.holds(sizes)


def _needed(graph: Graph, wanted: set[Node]) -> set[Node]:
    """The nodes that make what is wanted, with those that write to it."""
    needed: set[Node] = set()
    waiting = list(wanted)
    while waiting:
        while waiting:
            node = waiting.pop()
            if node not in needed:
                needed.add(node)
                waiting += node.all_input_nodes
        writers = (node for node in graph.nodes if node.meta.get("effect") and node not in needed)
        waiting += [node for node in writers if any(each in needed for each in node.all_input_nodes)]
    return needed


def _copied(graph: Graph, nodes: set[Node]) -> tuple[Graph, dict[Node, Node]]:
    copy, moved = Graph(), dict[Node, Node]()
    of: Callable[[Node], Node] = moved.__getitem__
    for node in graph.nodes:
        if node in nodes or node.op == "placeholder":
            moved[node] = copy.node_copy(node, of)
    copy.output(None)
    return copy, moved
