"""Find the nodes that write into the memory of a value."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from fractrain_fx.capture import changes_operands
from fractrain_fx.passes.graph.aliases import base, memory_of

__all__ = ["Writes"]


class Writes:
    """The writes of a graph into memory that values may share.

    Args:
        graph_module: the graph, as it is now.
    """

    def __init__(self, graph_module: GraphModule) -> None:
        self._graph_module = graph_module
        writers = [node for node in graph_module.graph.nodes if changes_operands(node)]
        self._changed = [(node, self._memory(base(node))) for node in writers]

    def last(self, value: Node, reader: Node) -> Node | None:
        """The last node before ``reader`` that may change the memory of a value."""
        memory = self._memory(value) if self._changed else None
        return next((node for node, changed in reversed(self._changed) if node < reader and changed == memory), None)

    def _memory(self, value: Node | None) -> object:
        """The node whose memory a value may share; a parameter or buffer, which several nodes read, by its path."""
        node = memory_of(value, self._graph_module)
        return node.target if node is not None and node.op == "get_attr" else node
