"""The graph being written, and which node stands for which tensor."""

from __future__ import annotations

import dataclasses
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from keyword import iskeyword
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from fractrain_fx.capture.callees import Callee
from fractrain_fx.capture.constants import Additions
from fractrain_fx.capture.sizes import SymbolicFloat, SymbolicInt, plain
from fractrain_fx.capture.targets import function_node
from fractrain_fx.capture.trees import fields_of, holds_tensor, tensors_in
from fractrain_fx.capture.values import ValueList

__all__ = ["Obstacle", "Source", "UnrepresentableError", "Writer"]

_LITERALS = (str, bool, int, float, complex, type(None), type(...), torch.dtype, torch.layout, torch.memory_format)

ModuleStack = OrderedDict[str, tuple[str, type[nn.Module]]]


class UnrepresentableError(Exception):
    """An argument has no form in generated code."""


@dataclass(frozen=True)
class Obstacle:
    """What makes a graph wrong for other data, and why.

    Attributes:
        module: path of the module to keep as one node.
        cause: why, in words.
        callees: what to try first: one of the functions and methods that ran, innermost first.
    """

    module: str
    cause: str
    callees: tuple[Callee, ...] = ()


class Source(Enum):
    """What a value depends on, as far as it matters here."""

    INPUT = "the call's tensors, so that sizes vary"
    DATA = "values that vary: inputs, parameters, buffers, random numbers"
    RANDOM = "random numbers"


class Writer:
    """Nodes, and the map from tensors (by identity) to nodes.

    Attributes:
        graph: what was written so far.
        stack: the modules whose forward runs, outermost first, as fx notes them on nodes.
        obstacles: what was met that the graph cannot hold.
        additions: what goes under ``frac``.
    """

    def __init__(self, model: nn.Module, additions: Additions) -> None:
        self.graph = Graph()
        self.stack: ModuleStack = OrderedDict({"": ("", type(model))})
        self.obstacles: list[Obstacle] = []
        self.additions = additions
        self._home: tuple[Node, torch.device] | None = None
        self._alive: list[Any] = []
        self._nodes: dict[int, Node] = {}
        self._cache: dict[Any, Node] = {}
        self._sources: dict[Source, set[Node]] = {source: set() for source in Source}
        self._blamed: set[int] = set()
        self._names: dict[int, list[str]] = {}
        for named in (model.named_parameters, model.named_buffers):
            for name, tensor in named(remove_duplicate=False):
                self._names.setdefault(id(tensor), []).append(name)

    @property
    def path(self) -> str:
        """Path of the module whose forward runs."""
        return next(reversed(self.stack))

    def block(self, cause: str, callees: tuple[Callee, ...] = ()) -> None:
        """Note that the module that runs cannot be written down as it is."""
        self.obstacles.append(Obstacle(self.path, cause, callees))

    def require_known(self, result: Any) -> None:
        """Note if the module that runs returns what no recorded call computed."""
        for x in tensors_in(result):
            if self.known(x) is None:
                self._require_shown(x)

    def placeholder(self, name: str) -> Node:
        """A new input of the graph."""
        node = self.create("placeholder", name)
        self._mark(node, (Source.INPUT, Source.DATA))
        return node

    def create(
        self,
        op: str,
        target: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        effect: bool = False,
    ) -> Node:
        """A node of the module that runs; it depends on what its arguments depend on."""
        node = self.graph.create_node(op, target, args, kwargs or {})
        node.meta["nn_module_stack"] = self.stack
        if effect:
            node.meta["effect"] = True
        for members in self._sources.values():
            if any(argument in members for argument in node.all_input_nodes):
                members.add(node)
        if op == "call_module" or (op == "get_attr" and not str(target).startswith("frac.")):
            self._mark(node, (Source.DATA,))
        return node

    def bind(self, value: Tensor, node: Node) -> None:
        """Let ``node`` stand for this very tensor object."""
        self._alive.append(value)
        self._nodes[id(value)] = node
        if self._home is None:
            self._home = node, value.device

    def known(self, value: Tensor) -> Node | None:
        """The node that a tensor came from, if it came from one."""
        node = self._nodes.get(id(value))
        return None if node is None or node._erased else node

    def node_of(self, value: Tensor) -> Node:
        """The node that stands for a tensor; parameters, buffers and unknown tensors get one when first used."""
        node = self.known(value)
        if node is not None:
            return node
        names = self._names.get(id(value))
        if names:
            own = [name for name in names if name.rpartition(".")[0] == self.path]
            return self._attribute((own or names)[0])
        self._require_shown(value)
        self._alive.append(value)
        return self._attribute(self.additions.constant(value))

    def depends(self, value: Tensor, source: Source) -> bool:
        """Whether a tensor depends on ``source``."""
        return self.node_of(value) in self._sources[source]

    def mark_random(self, node: Node) -> None:
        """The node draws random numbers."""
        self._mark(node, (Source.DATA, Source.RANDOM))

    def argument(self, value: Any, cut: bool = False) -> Any:
        """A value as a node's argument.

        Args:
            value: what the call was given.
            cut: whether gradients are off, so that tensors enter detached.

        Raises:
            UnrepresentableError: something in ``value`` has no form in generated code.
        """
        if isinstance(value, Tensor):
            node = self.node_of(value)
            return self.detached(node) if cut and value.requires_grad else node
        if isinstance(value, (SymbolicInt, SymbolicFloat)):
            return self._symbol(value)
        if isinstance(value, ValueList):
            node = self.node_of(value.source)
            return self._once(("tolist", node), lambda: self.create("call_method", "tolist", (node,)))
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, torch.device):
            return self.device(value)
        if isinstance(value, (Node, *_LITERALS)):
            return value
        if isinstance(value, range):
            return tuple(value)
        if isinstance(value, (tuple, list)):
            parts = [self.argument(part, cut) for part in value]
            if isinstance(value, list):
                return parts
            return self._built(type(value), parts, {}) if hasattr(value, "_fields") else tuple(parts)
        if isinstance(value, slice):
            return slice(*(self.argument(part, cut) for part in (value.start, value.stop, value.step)))
        if type(value) is dict:
            return {
                key: self.device(torch.device(part))
                if key == "device" and isinstance(part, (str, int))
                else self.argument(part, cut)
                for key, part in value.items()
            }
        return self._object(value, cut)

    def results(self, result: Any, node: Node, taken: set[int], in_place: set[int], cut: bool = False) -> Any:
        """Map the tensors in a call's result to its node.

        Args:
            result: what the call returned.
            node: the call's node.
            taken: identities of the call's arguments.
            in_place: those among them that the call changed.
            cut: whether the results were computed without gradients although the node would have some.

        Returns:
            ``result``, with a new tensor object in the place of each one that is an argument merely handed back: two
            nodes must not share one identity, or users of the argument would be re-routed through this call.
        """
        if isinstance(result, Tensor):
            if id(result) in in_place or (node.op == "call_method" and str(node.target).endswith("_")):
                return result
            if id(result) in taken or self.known(result) is not None or id(result) in self._names:
                result = torch.ops.aten.alias.default(result)
            self.bind(result, self.detached(node) if cut and result.is_floating_point() else node)
            return result
        if isinstance(result, (tuple, list)):
            parts = [self._part(part, operator.getitem, node, i, taken, in_place, cut) for i, part in enumerate(result)]
            if all(a is b for a, b in zip(parts, result, strict=True)):
                return result
            if isinstance(result, list):
                return parts
            return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
        items = result.items() if isinstance(result, Mapping) else fields_of(result)
        follow = operator.getitem if isinstance(result, Mapping) else getattr
        for key, part in items:
            self._part(part, follow, node, key, taken, in_place, cut)
        return result

    def touched(self, x: Tensor, node: Node, result: Any) -> None:
        """A call changed ``x``: later uses read it from the call if that returns it."""
        before = self.known(x)
        if result is x:
            self.bind(x, node)
        elif before is not None:
            for members in self._sources.values():
                if node in members:
                    members.add(before)

    def detached(self, node: Node) -> Node:
        """The node's value, cut from autograd."""
        return self._once(("detach", node), lambda: self.create("call_method", "detach", (node,)))

    def device(self, device: torch.device) -> Any:
        """A device; that of the inputs becomes a node which follows the inputs."""
        if self._home is None:
            return device
        home, where = self._home
        if device != where and (device.type != where.type or None not in (device.index, where.index)):
            return device
        return self._once(("device", home), lambda: self.create("call_function", getattr, (home, "device")))

    def device_type(self, device_type: str) -> Any:
        """A kind of device ("cpu"); that of the inputs becomes a node which follows the inputs."""
        device = self.device(torch.device(device_type))
        if not isinstance(device, Node):
            return device_type
        return self._once(("type", device), lambda: self.create("call_function", getattr, (device, "type")))

    def erase_after(self, mark: Node) -> None:
        """Take back all nodes after ``mark``."""
        while (last := self.graph._root.prev) is not mark:
            self.graph.erase_node(last)

    def _part(
        self,
        part: Any,
        follow: Callable[..., Any],
        node: Node,
        key: Any,
        taken: set[int],
        in_place: set[int],
        cut: bool,
    ) -> Any:
        if not holds_tensor(part):
            return part
        return self.results(part, self.create("call_function", follow, (node, key)), taken, in_place, cut)

    def _require_shown(self, value: Tensor) -> None:
        """An unknown tensor with a history was computed unseen: by the first module that returns or uses it."""
        if value.grad_fn is not None and id(value) not in self._blamed:
            self._alive.append(value)
            self._blamed.add(id(value))
            self.block("it holds a tensor computed by calls that torch does not show (scripted or foreign code, vmap)")

    def _object(self, value: Any, cut: bool) -> Any:
        """An instance that holds tensors, rebuilt by a call of its class."""
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            parts = {key: self.argument(part, cut) for key, part in value.items()}
            names = all(key.isidentifier() and not iskeyword(key) for key in parts)
            return self._built(type(value), (), parts) if names else self._built(type(value), (parts,), {})
        if holds_tensor(value) and not isinstance(value, Mapping):
            wanted = [field.name for field in dataclasses.fields(value) if field.init]
            return self._built(type(value), (), {name: self.argument(getattr(value, name), cut) for name in wanted})
        leaves, spec = pytree.tree_flatten(value)
        if leaves == [value] or not holds_tensor(leaves):
            raise UnrepresentableError(type(value).__name__)
        rebuild = function_node(lambda *parts: pytree.tree_unflatten(parts, spec), type(value).__name__)
        return self.create("call_function", rebuild, tuple(self.argument(part, cut) for part in leaves))

    def _built(self, kind: type[Any], args: Iterable[Any], kwargs: dict[str, Any]) -> Node:
        # A class as a node's argument or target breaks code generation; a function that calls it does not.
        return self.create("call_function", function_node(kind, kind.__name__), tuple(args), kwargs)

    def _attribute(self, name: str) -> Node:
        return self._once(("get_attr", name), lambda: self.create("get_attr", name))

    def _symbol(self, value: SymbolicInt | SymbolicFloat) -> Any:
        if value.op is torch.Tensor.size:
            node = self.known(value.operands[0])
            if node is None:
                return plain(value)
            operands: tuple[Any, ...] = (node, value.operands[1])
            return self._once(("size", operands), lambda: self.create("call_method", "size", operands))
        operands = tuple(self._symbol(x) if isinstance(x, (SymbolicInt, SymbolicFloat)) else x for x in value.operands)
        if not any(isinstance(x, Node) for x in operands):
            return plain(value)
        return self._once((value.op, operands), lambda: self.create("call_function", value.op, operands))

    def _once(self, key: Any, make: Callable[[], Node]) -> Node:
        node = self._cache.get(key)
        if node is None or node._erased:
            node = self._cache[key] = make()
        return node

    def _mark(self, node: Node, sources: Iterable[Source]) -> None:
        for source in sources:
            self._sources[source].add(node)
