"""Find the nodes that write into the memory of a value."""

from __future__ import annotations

from torch.fx import Graph, Node

from fractrain_fx.passes.graph.aliases import memory_of, written

__all__ = ["Writes"]


class Writes:
    """The writes of a graph, as it is now, into memory that values may share."""

    def __init__(self, graph: Graph) -> None:
        changed = {node: written(node) for node in graph.nodes}
        self._changed = [(node, self._memory(operands)) for node, operands in changed.items() if operands]

    def last(self, value: Node, reader: Node) -> Node | None:
        """The last node before ``reader`` that may change the memory of a value."""
        memory = self._memory([value]) if self._changed else set()
        writers = (node for node, changed in reversed(self._changed) if not changed.isdisjoint(memory))
        return next((node for node in writers if node < reader), None)

    def _memory(self, values: list[Node]) -> set[object]:
        """The nodes whose memory values may share; parameters and buffers, which several nodes read, by their paths."""
        shared = {node for value in values for node in memory_of(value)}
        return {node.target if node.op == "get_attr" else node for node in shared}
