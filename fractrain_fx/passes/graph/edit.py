"""Small queries of a graph, and the one way to insert a module into it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from torch import nn
from torch.fx import Graph, GraphModule, Node

from fractrain_fx.capture import PLACE
from fractrain_fx.errors import PassError
from fractrain_fx.execution.blocks.dispatched_block import DispatchedBlock
from fractrain_fx.execution.blocks.original import Original
from fractrain_fx.passes.graph.facts import Facts, Op, Role, facts

__all__ = [
    "NAMESPACE",
    "between",
    "call",
    "copied",
    "gradient_path",
    "graphs_of",
    "identifier",
    "insert_module",
    "module_path",
    "nodes_until",
    "origin",
    "original_at",
    "owner_module",
    "reached",
    "read",
    "unique",
    "varying",
]

NAMESPACE = "frac"

M = TypeVar("M", bound=nn.Module)


def module_path(node: Node) -> str:
    """Path of the module whose forward issued a node (the module itself for ``call_module``); "" for the model."""
    if node.op == "call_module":
        return str(node.target)
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    return str(path)


def owner_module(graph_module: GraphModule, node: Node) -> nn.Module | None:
    """The module that a ``call_module`` node calls."""
    return graph_module.get_submodule(str(node.target)) if node.op == "call_module" else None


def original_at(graph_module: GraphModule, node: Node) -> Original:
    """Finds, at each call, the module of the model that a ``call_module`` node calls."""
    return Original(cast(dict[str, nn.Module], graph_module._modules), str(node.target))


def graphs_of(graph_module: GraphModule) -> Iterator[GraphModule]:
    """A graph, and those of the blocks that were taken out of it."""
    yield graph_module
    for node in graph_module.graph.find_nodes(op="call_module"):
        module = owner_module(graph_module, node)
        if isinstance(module, DispatchedBlock):
            yield from graphs_of(module.region)


def varying(graph: Graph) -> set[Node]:
    """Nodes that depend on the values of the model's inputs (those that depend on sizes only are left out)."""
    moving: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or any(
            source in moving and facts(source).tensors for source in node.all_input_nodes
        ):
            moving.add(node)
    return moving


def reached(starts: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Some nodes, and all that follow them, one step after another."""
    visited = set(starts)
    waiting = list(visited)
    while waiting:
        new = [node for node in following(waiting.pop()) if node not in visited]
        visited.update(new)
        waiting += new
    return visited


def between(entry: Node, end: Node, sources: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Nodes on a path from ``entry`` to ``end``, ``end`` included and ``entry`` not; none without such a path.

    Looks only at nodes recorded between the two, so that its cost does not grow with the depth of the model.
    """
    window = reached([end], lambda node: [source for source in sources(node) if source > entry])
    reachable = {entry}
    for node in sorted(window):
        if any(source in reachable for source in sources(node)):
            reachable.add(node)
    return reachable - {entry} if end in reachable else set()


def nodes_until(node: Node, last: Node) -> Iterator[Node]:
    """The nodes from ``node`` on that come before ``last`` in the graph."""
    while node is not last:
        yield node
        node = node.next


def identifier(name: str) -> str:
    """A name that can be one attribute of a module: dots and signs become underscores."""
    return re.sub(r"\W", "_", name) or "model"


def gradient_path(op: Op) -> str:
    """The path under ``frac`` of the quantizer of an op's output gradient."""
    return f"quant.{identifier(op.name)}.gradient"


def insert_module(graph_module: GraphModule, path: str, make: Callable[[], M]) -> M:
    """The module at ``frac.<path>``, made now unless the graph of the other mode already has it."""
    full = f"{NAMESPACE}.{path}"
    try:
        existing = graph_module.get_submodule(full)
    except AttributeError:
        module = make()
        if not graph_module.add_submodule(full, module):
            raise PassError(f"{full!r} already exists and is not a module; was the model rewritten before?") from None
        return module
    return existing  # type: ignore[return-value]  # the path fixes the class


def call(
    graph: Graph,
    path: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    role: Role,
    owner: str,
    like: Node | None = None,
) -> Node:
    """A ``call_module`` node on ``frac.<path>`` at the present insertion point, with its record."""
    node = graph.call_module(f"{NAMESPACE}.{path}", tuple(args), dict(kwargs or {}))
    _record(node, role, owner, like)
    return node


def copied(inputs: Iterable[Node], nodes: Iterable[Node]) -> tuple[Graph, dict[Node, Node]]:
    """A graph of some nodes without an output, and the copy of each; ``inputs`` become placeholders.

    The attributes that the nodes read are copied too, unless they are inputs.
    """
    graph, values = Graph(), dict[Node, Node]()
    for node in inputs:
        values[node] = graph.placeholder(node.name)
        values[node].meta = dict(node.meta)
    for node in nodes:
        for source in node.all_input_nodes:
            if source.op == "get_attr" and source not in values:
                values[source] = graph.node_copy(source)
        values[node] = graph.node_copy(node, values.__getitem__)
    return graph, values


def read(graph: Graph, path: str, *, owner: str) -> Node:
    """A ``get_attr`` node on the buffer ``frac.<path>`` at the present insertion point."""
    node = graph.create_node("get_attr", f"{NAMESPACE}.{path}")
    _record(node, "bits", owner, None)
    return node


def _record(node: Node, role: Role, owner: str, like: Node | None) -> None:
    source = facts(like) if like is not None else Facts()
    node.meta["frac"] = replace(source, op=None, blocks=(), role=role, owner=owner)
    if like is not None:
        node.meta.update(origin(like))


def origin(node: Node) -> dict[str, Any]:
    """The entries of a node's ``meta`` that say where in the model it comes from; all else is about its own call."""
    return {key: node.meta[key] for key in ("nn_module_stack", "source", PLACE) if key in node.meta}


def unique(name: str, taken: Iterable[str]) -> str:
    """``name``, or ``name_1``, ``name_2``, ... if it is taken."""
    taken = set(taken)
    candidate, number = name, 0
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate
