"""The paths of activations through a rewritten graph, and the block of each node."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import GraphModule, Node

from fractrain_fx.passes import Block, blocks_of, facts
from fractrain_fx.passes.graph.edit import between, reached, varying
from fractrain_fx.passes.graph.tensors import QUANTIZERS

__all__ = ["Flow"]


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
        self.blocks = blocks_of(self.graph)
        self.block_of = self._memberships()

    def sources(self, node: Node) -> list[Node]:
        """The activations that a node reads; for a quantize node, what it quantizes."""
        read = node.all_input_nodes[:1] if facts(node).role in QUANTIZERS else node.all_input_nodes
        return [source for source in read if source in self.activations]

    def masks(self, node: Node) -> list[Node]:
        """The model's inputs from which a node of a block gets tensors that carry no gradient, such as masks."""
        if node not in self.block_of or facts(node).role is not None:
            return []
        return self._inputs(reached(self._masks_read(node), self._masks_read))

    def _masks_read(self, node: Node) -> list[Node]:
        """The tensors without a gradient that a node reads, if they depend on the model's inputs."""
        apart = [source for source in node.all_input_nodes if source in self._moving and source not in self.activations]
        return [mask for mask in apart if facts(mask).tensors and facts(mask).role is None]

    def is_quantizer(self, node: Node) -> bool:
        """Whether a node rounds an operand or a gradient."""
        return facts(node).role in QUANTIZERS

    def inputs(self, nodes: Iterable[Node]) -> list[Node]:
        """The model's inputs that nodes are computed from."""
        return self._inputs(reached(nodes, lambda node: node.all_input_nodes))

    def _inputs(self, among: set[Node]) -> list[Node]:
        return [node for node in self.graph.find_nodes(op="placeholder") if node in among]

    def _memberships(self) -> dict[Node, Block]:
        """The block of every node that lies between a block's entry and its exit; residual blocks come first."""
        members = {
            node: block
            for node in self.nodes.values()
            if (op := facts(node).op)
            for block in self.blocks
            if op.block == block.name
        }
        for block in sorted(self.blocks, key=lambda block: block.skip is None):
            entry, end = self.nodes[block.entry], self.nodes[block.exit]
            inside = between(entry, end, self.sources) if end in self.activations else ()
            for node in inside:
                op = facts(node).op
                if op is None or op.block == block.name:
                    members.setdefault(node, block)
        return members
