"""Remove unused nodes without side effects, and undo lists of all samples."""

from __future__ import annotations

import operator

import torch
from torch import nn
from torch.fx import Graph, Node

from fractrain_fx.capture.recording.ambient import REGIONS
from fractrain_fx.capture.targets import IN_PLACE_OPERATORS

__all__ = ["changes_operands", "has_effect", "join_whole_lists", "remove_dead"]

_JOINS = (torch.cat, torch.concat, torch.stack)
_UNBINDS = ("unbind", torch.unbind)
_SPLITS = ("split", torch.split)


def remove_dead(graph: Graph) -> bool:
    """Erase unused nodes without effects, last first, then regions left empty.

    Returns:
        Whether anything was erased.
    """
    before = len(graph.nodes)
    for node in reversed(graph.nodes):
        if not node.users and not has_effect(node):
            graph.erase_node(node)
    _remove_empty_regions(graph)
    return len(graph.nodes) != before


def join_whole_lists(graph: Graph) -> set[Node]:
    """Pass all parts that ``unbind`` or ``split`` gives to ``cat`` and ``stack`` in one list, however many there are.

    Models that keep their images in a list and join them again would otherwise be fixed to one batch size. Call it
    before any node is erased: while each part still has its node, these show whether a list has all parts.

    Returns:
        The ``unbind`` and ``split`` nodes of which no part is used alone any more: the graph holds for any number.
    """
    sources: set[Node] = set()
    for node in graph.nodes:
        parts = node.args[0] if node.args and node.target in _JOINS else None
        if not isinstance(parts, list | tuple) or not parts or not isinstance(parts[0], Node):
            continue
        source = parts[0].args[0] if parts[0].target is operator.getitem else None
        if not isinstance(source, Node) or list(source.users) != list(parts):
            continue
        joined = source.target in _SPLITS and node.target is not torch.stack and _dim(node, 1) == _dim(source, 2)
        if joined or source.target in _UNBINDS:
            node.update_arg(0, source)
            sources.add(source)
    return {
        source for source in sources if not any(part.users for part in source.users if part.target is operator.getitem)
    }


def _dim(node: Node, place: int) -> object:
    return node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0)


def has_effect(node: Node) -> bool:
    """Whether a node matters even if its result is unused.

    It does if it changed a tensor or drew random numbers when it was recorded, or if it is written in a way that
    changes its operands.
    """
    return node.op in ("placeholder", "output") or bool(node.meta.get("effect")) or changes_operands(node)


def changes_operands(node: Node) -> bool:
    """Whether a node is ``setitem``, a method that ends in ``_``, or called with ``out=`` or ``inplace=True``."""
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__")
    if node.op == "call_module":
        owner = node.graph.owning_module
        module = None if owner is None else owner.get_submodule(str(node.target))
        return isinstance(module, nn.Module) and bool(getattr(module, "inplace", False))
    return node.target in IN_PLACE_OPERATORS or bool(node.kwargs.get("inplace")) or node.kwargs.get("out") is not None


def _remove_empty_regions(graph: Graph) -> None:
    """Erase regions without nodes. Regions nest, so an inner region goes before the one around it."""
    opened: list[Node] = []
    for node in list(graph.nodes):
        if node.target in REGIONS:
            opened.append(node)
        elif node.target in REGIONS.values() and opened and node.args == (opened[-1],) and node.prev is opened.pop():
            entry = node.prev
            graph.erase_node(node)
            graph.erase_node(entry)
