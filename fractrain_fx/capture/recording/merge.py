"""Make one graph for both modes: constants that differ become nodes that follow the mode."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

from torch.fx import Graph, Node

from fractrain_fx.capture.recording.constants import Additions
from fractrain_fx.capture.recording.writer import SHAPE
from fractrain_fx.capture.source import CAPTURE

__all__ = ["merge_modes", "same_calls"]


class _DifferError(Exception):
    """The two graphs are not the same calls in the same order."""


def merge_modes(train: Graph, evaluation: Graph, additions: Additions) -> bool:
    """Make ``train`` serve both modes, if the two graphs differ only in constants.

    Constants that differ are replaced by ``call_module`` nodes of mode switches.

    Returns:
        Whether that was possible; if not, nothing was changed.
    """
    changes = _changes(train, evaluation, additions)
    if changes is None:
        return False
    for node, args, kwargs in changes:
        with train.inserting_before(node):
            switch = _switcher(train, node, additions)
            node.args = _mixed(node.args, args, switch)
            node.kwargs = _mixed(node.kwargs, kwargs, switch)
    return True


def same_calls(a: Graph, b: Graph, additions: Additions) -> bool:
    """Whether two graphs make the same calls, with the same constants, on tensors of the same shapes."""
    shapes = ([node.meta.get(SHAPE) for node in graph.nodes if node.op != "get_attr"] for graph in (a, b))
    return operator.eq(*shapes) and _changes(a, b, additions) == []


def _changes(train: Graph, evaluation: Graph, additions: Additions) -> list[tuple[Node, Any, Any]] | None:
    """Nodes whose constants differ, with the other graph's arguments; ``None`` if the graphs make other calls."""
    pairs: dict[Node, Node] = {}
    changes: list[tuple[Node, Any, Any]] = []
    # The place of a get_attr node does not matter, so these nodes are compared as arguments.
    calls = [[node for node in graph.nodes if node.op != "get_attr"] for graph in (train, evaluation)]
    if len(calls[0]) != len(calls[1]):
        return None
    try:
        for ours, theirs in zip(*calls, strict=True):
            if (ours.op, _name(ours)) != (theirs.op, _name(theirs)):
                return None
            found: list[tuple[Any, Any]] = []
            _compare(ours.args, theirs.args, pairs, found, additions)
            _compare(ours.kwargs, theirs.kwargs, pairs, found, additions)
            if found:
                changes.append((ours, theirs.args, theirs.kwargs))
            pairs[theirs] = ours
    except _DifferError:
        return None
    return changes


def _name(node: Node) -> Any:
    # Functions made for one recording (such as one that rebuilds an output) only differ as objects.
    local = getattr(node.target, "__qualname__", None) if callable(node.target) else None
    made_here = str(getattr(node.target, "__module__", "")).startswith(f"{CAPTURE}.")
    return local if made_here else node.target


def _compare(a: Any, b: Any, pairs: dict[Node, Node], found: list[tuple[Any, Any]], additions: Additions) -> None:
    if isinstance(a, Node) and isinstance(b, Node) and a.op == b.op == "get_attr":
        if not additions.same(str(a.target), str(b.target)):
            raise _DifferError
    elif isinstance(a, Node) or isinstance(b, Node):
        if not isinstance(b, Node) or pairs.get(b) is not a:
            raise _DifferError
    elif _alike(a, b):
        for x, y in _children(a, b):
            _compare(x, y, pairs, found, additions)
    elif isinstance(a, (tuple, list, dict, slice)) or isinstance(b, (tuple, list, dict, slice)):
        raise _DifferError
    elif type(a) is not type(b) or not (a == b or (a != a and b != b)):
        found.append((a, b))


def _mixed(a: Any, b: Any, switch: Callable[[Any, Any], Node]) -> Any:
    if isinstance(a, Node):
        return a
    if isinstance(a, dict):
        return {key: _mixed(a[key], b[key], switch) for key in a}
    if isinstance(a, slice):
        return slice(*(_mixed(x, y, switch) for x, y in _children(a, b)))
    if isinstance(a, (tuple, list)):
        parts = [_mixed(x, y, switch) for x, y in zip(a, b, strict=True)]
        if isinstance(a, list):
            return parts
        return type(a)(*parts) if hasattr(a, "_fields") else tuple(parts)
    return a if type(a) is type(b) and (a == b or a != a) else switch(a, b)


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b)
    return isinstance(a, slice) and isinstance(b, slice)


def _children(a: Any, b: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(a, dict):
        return [(a[key], b[key]) for key in a]
    if isinstance(a, slice):
        return [(a.start, b.start), (a.stop, b.stop), (a.step, b.step)]
    return list(zip(a, b, strict=True))


def _switcher(graph: Graph, node: Node, additions: Additions) -> Callable[[Any, Any], Node]:
    def switch(train_value: Any, eval_value: Any) -> Node:
        made = graph.call_module(additions.switch(train_value, eval_value))
        made.meta["nn_module_stack"] = node.meta["nn_module_stack"]
        return made

    return switch
