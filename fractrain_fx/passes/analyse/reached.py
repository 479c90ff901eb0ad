"""Find the nodes that a gradient of the model's output reaches: ``detach`` and ``no_grad`` end its way."""

from __future__ import annotations

from torch.fx import Graph, Node

from fractrain_fx.passes.graph.aliases import shares_memory, written
from fractrain_fx.passes.graph.facts import facts

__all__ = ["reached_by_gradient"]


def reached_by_gradient(graph: Graph) -> set[Node]:
    """The nodes whose value would receive a gradient of the output if every parameter were trained.

    A node that writes into memory which others read counts as reached. The graph needs the annotations of ``Shapes``.
    """
    found: set[Node] = set()
    later: set[Node] = set()
    for node in reversed(graph.nodes):
        writes = any(_is_read_elsewhere(operand, later) for operand in written(node))
        read = any(user in found for user in node.users)
        if node.op == "output" or writes or (read and _passes(node)):
            found.add(node)
        later.add(node)
    return found


def _is_read_elsewhere(operand: Node, later: set[Node]) -> bool:
    """Whether nodes may read what was written to an operand otherwise than from the node that writes."""
    return bool(shares_memory(operand)) or any(user in later for user in operand.users)


def _passes(node: Node) -> bool:
    """Whether a gradient passes through a node: also through objects that may hold tensors, but not through sizes."""
    if facts(node).tensors:
        return facts(node).flows
    return node.op != "call_method" and not (
        node.target is getattr and facts(node.all_input_nodes[0]).shape is not None
    )
