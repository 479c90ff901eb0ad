"""Find the nodes that a gradient of the model's output reaches: ``detach`` and ``no_grad`` end its way."""

from __future__ import annotations

from torch.fx import Graph, Node

from fractrain_fx.capture import changes_operands
from fractrain_fx.passes.graph.aliases import base, is_view
from fractrain_fx.passes.graph.facts import facts

__all__ = ["reached_by_gradient"]


def reached_by_gradient(graph: Graph) -> set[Node]:
    """The nodes whose value would receive a gradient of the output if every parameter were trained.

    A node that writes into memory which others read counts as reached. The graph needs the annotations of ``Shapes``.
    """
    found: set[Node] = set()
    later: set[Node] = set()
    for node in reversed(graph.nodes):
        writes = changes_operands(node) and _is_read_elsewhere(base(node), later)
        read = any(user in found for user in node.users)
        if node.op == "output" or writes or (read and _passes(node)):
            found.add(node)
        later.add(node)
    return found


def _is_read_elsewhere(written: Node | None, later: set[Node]) -> bool:
    """Whether nodes read what was written otherwise than from the node that writes."""
    return written is None or is_view(written) or any(user in later for user in written.users)


def _passes(node: Node) -> bool:
    """Whether a gradient passes through a node: also through objects that may hold tensors, but not through sizes."""
    if facts(node).tensors:
        return facts(node).flows
    return node.op != "call_method" and not (
        node.target is getattr and facts(node.all_input_nodes[0]).shape is not None
    )
