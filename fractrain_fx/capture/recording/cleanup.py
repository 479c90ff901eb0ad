"""Tidy recorded graphs: remove unused nodes, undo lists of all samples, and make one graph serve both modes."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from fractrain_fx.capture.compare import equal
from fractrain_fx.capture.recording.constants import Additions
from fractrain_fx.capture.recording.memory import memory_in, note_memory
from fractrain_fx.capture.recording.regions import REGIONS
from fractrain_fx.capture.recording.writer import SHAPE
from fractrain_fx.capture.source import CAPTURE
from fractrain_fx.capture.targets import IN_PLACE_OPERATORS

__all__ = ["changes_operands", "has_effect", "join_whole_lists", "merge_modes", "remove_dead", "same_calls"]

_JOINS = (torch.cat, torch.concat, torch.stack)
_UNBINDS = ("unbind", torch.unbind)
_SPLITS = ("split", torch.split)


def remove_dead(graph: Graph) -> bool:
    """Erase unused nodes without effects, last first, then regions left empty; tells whether it erased anything."""
    before = len(graph.nodes)
    for node in reversed(graph.nodes):
        if not node.users and not has_effect(node):
            graph.erase_node(node)
    _remove_empty_regions(graph)
    return len(graph.nodes) != before


def join_whole_lists(graph: Graph) -> set[Node]:
    """Pass all parts that ``unbind`` or ``split`` gives to ``cat`` and ``stack`` in one list, however many there are.

    Models that keep their images in a list and join them again would otherwise be fixed to one batch size. Call it
    before any node is erased: while each part still has its node, these show whether a list has all parts. Returns the
    ``unbind`` and ``split`` nodes whose parts are only read as a whole list: the graph holds for any number.
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
    """Whether a node's call changed an operand when it was recorded, or does so by the way in which it is written.

    It is then ``setitem``, a method that ends in ``_``, or called with ``out=`` or ``inplace=True``.
    """
    if memory_in(node).writes or node.target is setattr:
        return True
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


def merge_modes(train: Graph, evaluation: Graph, additions: Additions) -> bool:
    """Make ``train`` serve both modes, if the two graphs differ only in constants; otherwise change nothing.

    Constants that differ are replaced by ``call_module`` nodes of mode switches. Tells whether that was possible.
    """
    changes = _changes(train, evaluation, additions)
    if changes is None:
        return False
    for node, other in zip(_calls(train), _calls(evaluation), strict=True):
        note_memory(node, memory_in(other))
        if other.meta.get("effect"):
            node.meta["effect"] = True
    for node, other in changes:
        _follow_mode(node, other, additions)
    return True


def _calls(graph: Graph) -> list[Node]:
    """The nodes but for those that read attributes, whose places do not matter."""
    return [node for node in graph.nodes if node.op != "get_attr"]


def _follow_mode(node: Node, other: Node, additions: Additions) -> None:
    """Replace constants that differ from those of the other mode's node."""
    others = iter(_flat(other)[1])

    def followed(ours: Any) -> Any:
        theirs = next(others)
        if isinstance(ours, Node) or equal(ours, theirs):
            return ours
        switch = node.graph.call_module(additions.switch(ours, theirs))
        switch.meta["nn_module_stack"] = node.meta["nn_module_stack"]
        return switch

    with node.graph.inserting_before(node):
        arguments = map_aggregate((node.args, node.kwargs), followed)
    node.args, node.kwargs = arguments


def same_calls(a: Graph, b: Graph, additions: Additions) -> bool:
    """Whether two graphs make the same calls, with the same constants, on tensors of the same shapes."""
    shapes = ([node.meta.get(SHAPE) for node in _calls(graph)] for graph in (a, b))
    return operator.eq(*shapes) and _changes(a, b, additions) == []


def _changes(train: Graph, evaluation: Graph, additions: Additions) -> list[tuple[Node, Node]] | None:
    """Nodes whose constants differ, each with that of the other graph; ``None`` if the graphs make other calls."""
    pairs: dict[Node, Node] = {}
    changes: list[tuple[Node, Node]] = []
    calls = _calls(train), _calls(evaluation)  # attributes are compared as arguments
    if len(calls[0]) != len(calls[1]):
        return None
    for ours, theirs in zip(*calls, strict=True):
        (form, mine), (other_form, others) = _flat(ours), _flat(theirs)
        if (ours.op, _name(ours), form) != (theirs.op, _name(theirs), other_form):
            return None
        constants = []
        for a, b in zip(mine, others, strict=True):
            if not isinstance(a, Node) and not isinstance(b, Node):
                constants.append(equal(a, b))
            elif not _same_node(a, b, pairs, additions):
                return None
        if not all(constants):
            changes.append((ours, theirs))
        pairs[theirs] = ours
    return changes


def _flat(node: Node) -> tuple[Any, list[Any]]:
    """The containers of a node's arguments, and what lies in them."""
    leaves: list[Any] = []
    return map_aggregate((node.args, node.kwargs), lambda leaf: leaves.append(leaf)), leaves


def _same_node(a: Any, b: Any, pairs: dict[Node, Node], additions: Additions) -> bool:
    if not (isinstance(a, Node) and isinstance(b, Node)):
        return False
    if a.op == b.op == "get_attr":
        return additions.same(str(a.target), str(b.target))
    return pairs.get(b) is a


def _name(node: Node) -> Any:
    # Functions made for one recording (such as one that rebuilds an output) only differ as objects.
    local = getattr(node.target, "__qualname__", None) if callable(node.target) else None
    made_here = str(getattr(node.target, "__module__", "")).startswith(f"{CAPTURE}.")
    return local if made_here else node.target
