"""Make one graph for both modes: constants that differ become nodes that follow the mode."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from fractrain_fx.capture.recording.constants import Additions, same_constant
from fractrain_fx.capture.recording.writer import SHAPE
from fractrain_fx.capture.source import CAPTURE

__all__ = ["merge_modes", "same_calls"]


def merge_modes(train: Graph, evaluation: Graph, additions: Additions) -> bool:
    """Make ``train`` serve both modes, if the two graphs differ only in constants.

    Constants that differ are replaced by ``call_module`` nodes of mode switches.

    Returns:
        Whether that was possible; if not, nothing was changed.
    """
    changes = _changes(train, evaluation, additions)
    for node, other in changes or ():
        with train.inserting_before(node):
            values, switch = iter(_flat(other)[1]), _switcher(train, node, additions)
            given = map_aggregate((node.args, node.kwargs), lambda ours: _mixed(ours, next(values), switch))  # noqa: B023
            node.args, node.kwargs = given
    return changes is not None


def same_calls(a: Graph, b: Graph, additions: Additions) -> bool:
    """Whether two graphs make the same calls, with the same constants, on tensors of the same shapes."""
    shapes = ([node.meta.get(SHAPE) for node in graph.nodes if node.op != "get_attr"] for graph in (a, b))
    return operator.eq(*shapes) and _changes(a, b, additions) == []


def _changes(train: Graph, evaluation: Graph, additions: Additions) -> list[tuple[Node, Node]] | None:
    """Nodes whose constants differ, each with that of the other graph; ``None`` if the graphs make other calls."""
    pairs: dict[Node, Node] = {}
    changes: list[tuple[Node, Node]] = []
    # The place of a get_attr node does not matter, so these nodes are compared as arguments.
    calls = [[node for node in graph.nodes if node.op != "get_attr"] for graph in (train, evaluation)]
    if len(calls[0]) != len(calls[1]):
        return None
    for ours, theirs in zip(*calls, strict=True):
        (form, mine), (other_form, others) = _flat(ours), _flat(theirs)
        if (ours.op, _name(ours), form) != (theirs.op, _name(theirs), other_form):
            return None
        constants = []
        for a, b in zip(mine, others, strict=True):
            if not isinstance(a, Node) and not isinstance(b, Node):
                constants.append(same_constant(a, b))
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


def _mixed(a: Any, b: Any, switch: Callable[[Any, Any], Node]) -> Any:
    return a if isinstance(a, Node) or same_constant(a, b) else switch(a, b)


def _name(node: Node) -> Any:
    # Functions made for one recording (such as one that rebuilds an output) only differ as objects.
    local = getattr(node.target, "__qualname__", None) if callable(node.target) else None
    made_here = str(getattr(node.target, "__module__", "")).startswith(f"{CAPTURE}.")
    return local if made_here else node.target


def _switcher(graph: Graph, node: Node, additions: Additions) -> Callable[[Any, Any], Node]:
    def switch(train_value: Any, eval_value: Any) -> Node:
        made = graph.call_module(additions.switch(train_value, eval_value))
        made.meta["nn_module_stack"] = node.meta["nn_module_stack"]
        return made

    return switch
