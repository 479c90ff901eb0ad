"""The graph that is being written, and the map from tensors to nodes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from fractrain_fx.capture.recording.constants import Additions
from fractrain_fx.capture.recording.kept.callees import Callee
from fractrain_fx.capture.source import call_place, model_line
from fractrain_fx.capture.trees import is_strided, tensors_in

__all__ = ["ORDER", "PLACE", "SHAPE"]
__all__ += ["Obstacle", "Return", "UnrepresentableError", "ValueSource", "Writer", "nodes_after"]

SHAPE = "recorded_shape"
"""Key of ``node.meta``: the shape of the node's tensor in the recorded run."""

ORDER = "recorded_order"
"""Key of ``node.meta``: the dimensions of that tensor in memory, the outermost first; missing in the usual order."""

PLACE = "place"
"""Key of ``node.meta``: a number for the calls of Python code through which the node's call was made."""

ModuleStack = OrderedDict[str, tuple[str, type[nn.Module]]]


class UnrepresentableError(Exception):
    """An argument has no form in generated code."""


@dataclass(frozen=True)
class Obstacle:
    """A reason why a graph would be wrong for other data.

    Attributes:
        module: path of the module to keep as one node.
        cause: the reason in words.
        callees: functions and methods that ran, innermost first: keeping one of them as one call is tried first.
        line: file and line of the code that shows it; empty if only the module is known.
    """

    module: str
    cause: str
    callees: tuple[Callee, ...] = ()
    line: str = ""


@dataclass(frozen=True)
class Return:
    """The end of one call of the module at ``path``: the nodes of the tensors that it returned."""

    path: str
    nodes: tuple[Node | None, ...]


class ValueSource(Enum):
    """The sources that a value may depend on."""

    INPUT = "the call's tensors, so that sizes vary"
    DATA = "values that vary: inputs, parameters, buffers, random numbers"
    TIED = "inputs that have the same values in all calls that the graph takes"
    RANDOM = "random numbers"
    MODEL = "parameters and buffers"
    VALUE = "values of the call's tensors, and not their sizes alone"


class Writer:
    """Nodes, and the map from tensors (by identity) to nodes.

    Attributes:
        graph: the graph so far.
        stack: the modules whose forward runs, outermost first, as fx notes them on nodes.
        obstacles: the reasons found so far why the graph would be wrong.
        additions: the modules that go under ``frac``.
        paused: whether calls run without being written.
        cut: nodes that never have a history of gradients, because all that they were computed from is cut.
        returning: whether the output is written, in which a ``torch.Size`` is more than a tuple.
    """

    def __init__(self, model: nn.Module, additions: Additions) -> None:
        self.graph = Graph()
        self.stack: ModuleStack = OrderedDict({"": ("", type(model))})
        self.obstacles: list[Obstacle] = []
        self.additions = additions
        self.paused = self.returning = False
        self._home: tuple[Node, torch.device] | None = None
        self._alive: list[Any] = []
        self._nodes: dict[int, list[Node]] = {}  # the latest last: a fold erases those that it made
        self._cache: dict[Any, Node] = {}
        self._sources: dict[ValueSource, set[Node]] = {source: set() for source in ValueSource}
        self._blamed: set[int] = set()
        self._sized: dict[Node, frozenset[int]] = {}
        self.cut: set[Node] = set()
        self._names: dict[int, list[str]] = {}
        for named in (model.named_parameters, model.named_buffers):
            for name, tensor in named(remove_duplicate=False):
                self._names.setdefault(id(tensor), []).append(name)

    @property
    def path(self) -> str:
        """Path of the module whose forward runs."""
        return next(reversed(self.stack))

    @property
    def home_type(self) -> str | None:
        """The type of the inputs' device."""
        return None if self._home is None else self._home[1].type

    def block(self, cause: str, callees: tuple[Callee, ...] = (), line: str | None = None) -> None:
        """Note that the running module cannot be written as it is; ``line``: if not the one that runs."""
        self.obstacles.append(Obstacle(self.path, cause, callees, model_line() or "" if line is None else line))

    def require_known(self, result: Any) -> None:
        """Note an obstacle if the running module returns a tensor that no recorded call computed."""
        for x in tensors_in(result):
            if self.known(x) is None:
                self._require_shown(x)

    def release(self) -> None:
        """Let go of all tensors of the run. The writer is part of reference cycles, so it may live on for long."""
        self._alive.clear()
        self._nodes.clear()

    def placeholder(self, name: str, tied: bool = False) -> Node:
        """A new input of the graph; with ``tied``, the graph is for calls in which it has the recorded values."""
        node = self.create("placeholder", name)
        self._mark(node, (ValueSource.TIED,) if tied else (ValueSource.INPUT, ValueSource.DATA, ValueSource.VALUE))
        return node

    def create(
        self,
        op: str,
        target: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        effect: bool = False,
    ) -> Node:
        """A node of the running module; it depends on the sources of its arguments."""
        node = self.graph.create_node(op, target, args, kwargs or {})
        node.meta["nn_module_stack"] = self.stack
        node.meta["source"], node.meta[PLACE] = model_line(), call_place()
        if effect:
            node.meta["effect"] = True
        form = op == "call_method" and target in ("size", "stride")
        for source, members in self._sources.items():
            depends = any(argument in members for argument in node.all_input_nodes)
            if depends and not (form and source is ValueSource.VALUE):
                members.add(node)
        if op == "call_module" or (op == "get_attr" and not str(target).startswith("frac.")):
            self._mark(node, (ValueSource.DATA, ValueSource.MODEL))
        return node

    def once(self, key: Any, make: Callable[[], Node]) -> Node:
        """The node that was made for ``key``, or a new one if there is none or it was erased."""
        node = self._cache.get(key)
        if node is None or node._erased:
            node = self._cache[key] = make()
        return node

    def bind(self, value: Tensor, node: Node) -> None:
        """Map this tensor object to ``node``."""
        self._alive.append(value)
        self._nodes.setdefault(id(value), []).append(node)
        node.meta.setdefault(SHAPE, None if value.is_nested else tuple(value.shape))
        if is_strided(value) and not value.is_contiguous():
            strides = value.stride()
            order = tuple(sorted(range(value.ndim), key=lambda dim: (-strides[dim], dim)))
            if value.permute(order).is_contiguous():
                node.meta.setdefault(ORDER, order)
        if self._home is None:
            self._home = node, value.device

    def known(self, value: Tensor) -> Node | None:
        """The node that a tensor came from, or ``None``."""
        return next((node for node in reversed(self._nodes.get(id(value), ())) if not node._erased), None)

    def owned(self, value: Tensor) -> bool:
        """Whether a tensor is a parameter or buffer of the model."""
        return id(value) in self._names

    def node_of(self, value: Tensor) -> Node:
        """The node that stands for a tensor; parameters, buffers and unknown tensors get one when first used."""
        node = self.known(value)
        if node is not None:
            return node
        names = self._names.get(id(value))
        if names:
            here = [name for name in names if name.rpartition(".")[0] == self.path]
            return self._attribute((here or names)[0])
        self._require_shown(value)
        self._alive.append(value)
        return self._attribute(self.additions.constant(value))

    def depends(self, value: Tensor, source: ValueSource) -> bool:
        """Whether a tensor depends on ``source``."""
        return self.made_from(self.node_of(value), source)

    def made_from(self, node: Node, source: ValueSource) -> bool:
        """Whether a node's value depends on ``source``."""
        return node in self._sources[source]

    def mark_random(self, node: Node) -> None:
        """Note that the node draws random numbers."""
        self._mark(node, (ValueSource.DATA, ValueSource.RANDOM))

    def touched(self, x: Tensor, node: Node, result: Any, cut: bool = False) -> None:
        """Note that a call changed ``x``: later uses read it from the call, if the call returns it.

        A tensor that was changed with gradients switched off keeps the history that it has, so it keeps its node too.
        """
        before = self.known(x)
        if result is x and not (cut and before not in self.cut):
            self.bind(x, node)
        elif before is not None:
            for members in self._sources.values():
                if node in members:
                    members.add(before)

    def mark_sized(self, value: Tensor, dims: frozenset[int]) -> None:
        """Note that data decide the length of these dimensions of a tensor."""
        if dims and (node := self.known(value)) is not None:
            self._sized[node] = dims

    def sized_by_data(self, node: Node | None) -> frozenset[int]:
        """Dimensions of a node's tensor whose length data decide."""
        return self._sized.get(node, frozenset()) if node is not None else frozenset()

    def detached(self, node: Node) -> Node:
        """The node's value, cut from autograd; the node itself if it is cut already."""
        if node in self.cut:
            return node
        cut_node = self.once(("detach", node), lambda: self.create("call_method", "detach", (node,)))
        self.cut.add(cut_node)
        return cut_node

    def forget_detached(self, node: Node) -> None:
        """Cut the node's value anew when it is next needed: ``x.data = y`` has given it other memory."""
        self._cache.pop(("detach", node), None)

    def device(self, device: torch.device) -> Any:
        """A device; the inputs' device becomes a node that follows the inputs."""
        if self._home is None:
            return device
        home, where = self._home
        if device != where and (device.type != where.type or None not in (device.index, where.index)):
            return device
        return self.once(("device", home), lambda: self.create("call_function", getattr, (home, "device")))

    def device_type(self, device_type: str) -> Any:
        """A kind of device ("cpu"); that of the inputs becomes a node that follows the inputs."""
        device = self.device(torch.device(device_type))
        if not isinstance(device, Node):
            return device_type
        return self.once(("type", device), lambda: self.create("call_function", getattr, (device, "type")))

    def tensors(self) -> dict[Node, Tensor]:
        """The tensor of each node that stands for one."""
        return {node: x for x in self._alive if isinstance(x, Tensor) for node in self._nodes.get(id(x), ())}

    @property
    def last(self) -> Node:
        """The node that was written last."""
        return self.graph._root.prev

    def _require_shown(self, value: Tensor) -> None:
        """Note an obstacle for an unknown tensor that is not a constant, on the first module that returns or uses it.

        A tensor with a history is not constant, and a nested tensor is made of tensors without torch showing the call.
        """
        if (value.grad_fn is not None or value.is_nested) and id(value) not in self._blamed:
            self._alive.append(value)
            self._blamed.add(id(value))
            cause = "it holds a tensor computed by calls that torch does not show ({})"
            cause = cause.format("torch.nested" if value.is_nested else "scripted or foreign code, vmap")
            if self.additions.holds(value):
                cause = "it holds a tensor that was computed from parameters before forward: compute it in forward"
            self.block(cause, line="")

    def _attribute(self, name: str) -> Node:
        return self.once(("get_attr", name), lambda: self.create("get_attr", name))

    def _mark(self, node: Node, sources: Iterable[ValueSource]) -> None:
        for source in sources:
            self._sources[source].add(node)


def nodes_after(last: Node) -> Iterator[Node]:
    """The nodes of a graph that come after ``last``."""
    node = last.next
    while node.op != "root":
        yield node
        node = node.next
