"""The paths of activations through a rewritten graph, and the block of each node."""

from __future__ import annotations

from collections.abc import Iterable

import networkx as nx
from torch.fx import GraphModule, Node

from fractrain_fx.passes import Block, blocks_of, facts
from fractrain_fx.passes.graph.edit import varying

__all__ = ["Flow", "returned"]

_QUANTIZERS = ("input", "weight", "gradient")


class Flow:
    """Activations of a graph: nodes that depend on its inputs and could carry a gradient.

    Parameters, sizes, masks and bit widths are not activations. Quantize nodes are passed through.

    Args:
        graph_module: a rewritten graph of either mode.
    """

    def __init__(self, graph_module: GraphModule) -> None:
        self.graph = graph_module.graph
        self.nodes = {node.name: node for node in self.graph.nodes}
        self._moving = varying(self.graph)
        self.activations = {
            node for node in self.graph.nodes if node in self._moving and facts(node).flows and node.op != "output"
        }
        self._paths: nx.DiGraph = nx.DiGraph()
        self._paths.add_nodes_from(self.activations)
        for node in self.activations:
            self._paths.add_edges_from((source, node) for source in self.sources(node))
        self.blocks = blocks_of(self.graph)
        self.block_of = self._memberships()

    def sources(self, node: Node) -> list[Node]:
        """The activations that a node reads; for a quantize node, what it quantizes."""
        read = node.all_input_nodes[:1] if facts(node).role in _QUANTIZERS else node.all_input_nodes
        return [each for each in read if each in self.activations]

    def masks(self, node: Node) -> list[Node]:
        """The model's inputs from which a node of a block gets tensors that carry no gradient, such as masks."""
        if node not in self.block_of or facts(node).role is not None:
            return []
        return self._origins(each for each in node.all_input_nodes if each not in self.activations)

    def _origins(self, nodes: Iterable[Node]) -> list[Node]:
        seen: set[Node] = set()
        queue = list(nodes)
        while queue:
            node = queue.pop()
            known = node in self._moving and facts(node).tensors and facts(node).role is None
            if known and node not in seen and node not in self.activations:
                seen.add(node)
                queue.extend(node.all_input_nodes)
        return [node for node in self.graph.find_nodes(op="placeholder") if node in seen]

    def is_quantizer(self, node: Node) -> bool:
        """Whether a node rounds an operand or a gradient."""
        return facts(node).role in _QUANTIZERS

    def inputs(self, nodes: Iterable[Node]) -> list[Node]:
        """The model's inputs that nodes are computed from."""
        seen: set[Node] = set()
        queue = list(nodes)
        while queue:
            node = queue.pop()
            if node not in seen:
                seen.add(node)
                queue.extend(node.all_input_nodes)
        return [node for node in self.graph.find_nodes(op="placeholder") if node in seen]

    def _memberships(self) -> dict[Node, Block]:
        """The block of every node that lies between a block's entry and its exit; residual blocks come first."""
        found = {
            node: block
            for node in self.nodes.values()
            if (op := facts(node).op)
            for block in self.blocks
            if op.block == block.name
        }
        for block in sorted(self.blocks, key=lambda each: each.skip is None):
            for node in self._between(block):
                op = facts(node).op
                if op is None or op.block == block.name:
                    found.setdefault(node, block)
        return found

    def _between(self, block: Block) -> set[Node]:
        entry, end = self.nodes[block.entry], self.nodes[block.exit]
        if entry not in self._paths or end not in self._paths:
            return set()
        inside: set[Node] = nx.descendants(self._paths, entry) & nx.ancestors(self._paths, end)
        return inside | {end}


def returned(graph_module: GraphModule) -> list[Node]:
    """The nodes in the model's own output, without the cost."""
    given = next(iter(graph_module.graph.find_nodes(op="output"))).args[0]
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Node) and facts(given[1]).role == "cost":
        given = given[0]
    found: dict[Node, None] = {}

    def visit(value: object) -> None:
        if isinstance(value, Node):
            found[value] = None
        elif isinstance(value, dict):
            for each in value.values():
                visit(each)
        elif isinstance(value, list | tuple):
            for each in value:
                visit(each)

    visit(given)
    return list(found)
