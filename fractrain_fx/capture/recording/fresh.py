"""Give each call tensors of its own where forward makes them in ways that torch does not show: from arrays of numpy.

A graph keeps such a tensor as a constant, or the array that it is made from. A caller who changes a returned one, or a
later line that writes to it, would change it for all calls.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Graph, Node

from fractrain_fx.capture.compare import same
from fractrain_fx.capture.recording.constants import Additions
from fractrain_fx.capture.recording.memory import KEPT, memory_in
from fractrain_fx.capture.trees import is_strided

__all__ = ["copy_fresh", "exposed_constants"]


def exposed_constants(graph: Graph, additions: Additions) -> list[Node]:
    """The nodes of kept tensors, or tensors in kept arrays, that the caller gets or that a call may change."""
    return [node for node in graph.nodes if _kept(node, additions) and _is_exposed(node)]


def copy_fresh(graph: Graph, again: Graph, exposed: list[Node], additions: Additions) -> None:
    """Copy at every call what a second run of the model, which gave the graph ``again``, has in other memory.

    Both runs have an array or a tensor that existed before, such as a global variable, in one place.
    """
    others = dict(zip(graph.nodes, again.nodes, strict=True))
    for node in exposed:
        places = {_address(part) for part in _kept(node, additions)}
        if places.isdisjoint(map(_address, _kept(others[node], additions))):
            for part, before in node.meta.get(KEPT, ()):
                if not same(before, part):  # the recorded run wrote to it, through the tensor
                    np.asarray(part)[...] = np.asarray(before)
            users = list(node.users)
            with graph.inserting_after(node):
                copy = graph.call_method("clone", (node,))
            copy.meta.update(node.meta)
            copy.meta.pop(KEPT, None)
            for user in users:
                user.replace_input_with(node, copy)


def _kept(node: Node, additions: Additions) -> list[Any]:
    """The constants of a recording in a node: tensors with memory that the model does not hold, and arrays."""
    if node.op == "get_attr" and str(node.target).startswith("frac.constants."):
        x = additions.tensor(str(node.target))
        return [x] if not additions.holds(x) and is_strided(x) and not x.is_meta and x.numel() else []
    return [part for part, _ in node.meta.get(KEPT, ()) if np.asarray(part).size]


def _is_exposed(node: Node) -> bool:
    """Whether a node's memory is in the output, or a call writes to it."""
    seen, left = {node}, [node]
    while left:
        part = left.pop()
        for user in part.users:
            memory = memory_in(user)
            if user.op == "output" or user.meta.get("effect") or part in memory.written(user):
                return True
            if user not in seen and part in memory.shared(user):
                seen.add(user)
                left.append(user)
    return False


def _address(part: Any) -> int:
    if not isinstance(part, Tensor):
        return int(np.asarray(part).__array_interface__["data"][0])
    with torch._C.DisableTorchFunction():
        return part.data_ptr()
