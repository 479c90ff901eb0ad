"""The shapes of the tensors that enter and leave blocks and ops, in words."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import GraphModule, Node

from fractrain_fx.passes.graph.edit import between, varying
from fractrain_fx.passes.graph.facts import blocks_of, facts, ops_of

__all__ = ["QUANTIZERS", "block_inputs", "inputs_in_words", "shapes_in_words"]

QUANTIZERS = ("input", "weight", "gradient")
"""Roles of the nodes that round a value and keep its shape."""


def shapes_in_words(graph_module: GraphModule) -> dict[str, str]:
    """The shapes of each block and op, by its name: ``Nx64x8x8, time Nx32 -> Nx64x8x8``.

    ``N`` is the number of samples, ``4N`` four rows for each. The first input of a block is its entry. Every other
    input has the name of its op or node: a second branch, a time embedding, a mask. Weights are left out. The graph
    needs the annotations of ``Shapes``.
    """
    graph, moving = graph_module.graph, varying(graph_module.graph)
    nodes = {node.name: node for node in graph.nodes}
    words = {}
    for node, op in ops_of(graph):
        words[op.name] = _words([source for source in _read([node]) if source in moving], node, named=False)
    for block in blocks_of(graph):
        entry, end = nodes[block.entry], nodes[block.exit]
        words[block.name] = _words([entry, *block_inputs(entry, end, moving)], end, named=True)
    return words


def inputs_in_words(graph_module: GraphModule) -> str:
    """The shapes of the example inputs: ``input_ids Nx16, labels Nx16``."""
    inputs = graph_module.graph.find_nodes(op="placeholder")
    return ", ".join(f"{node.name} {_shape(node)}" for node in inputs if facts(node).shape is not None)


def block_inputs(entry: Node, end: Node, moving: set[Node]) -> list[Node]:
    """The tensors that a block reads besides its entry, in order of first use; ``end`` is its last node.

    Nodes in ``moving`` depend on the model's inputs.
    """
    inside = (between(entry, end, lambda node: node.all_input_nodes) | {end}) - {entry}
    return [node for node in _read(sorted(inside)) if node not in inside and node is not entry and node in moving]


def _read(readers: Iterable[Node]) -> list[Node]:
    """The tensors that nodes of the model read, without what a rewrite inserts."""
    sources: dict[Node, None] = {}
    for reader in readers:
        if facts(reader).role is None or facts(reader).role in QUANTIZERS:
            for source in reader.all_input_nodes:
                while facts(source).role in QUANTIZERS:
                    source = source.all_input_nodes[0]
                if facts(source).role is None and facts(source).shape is not None:
                    sources[source] = None
    return list(sources)


def _words(inputs: list[Node], output: Node, *, named: bool) -> str:
    shapes = [f"{_name(node)} {_shape(node)}" if named and place else _shape(node) for place, node in enumerate(inputs)]
    return f"{', '.join(shapes)} -> {_shape(output)}"


def _name(node: Node) -> str:
    op = facts(node).op
    return node.name if op is None else op.name


def _shape(node: Node) -> str:
    record = facts(node)
    sizes = [str(size) for size in record.shape or ()]
    batch = record.batch
    if batch is not None and not batch.whole and batch.axis < len(sizes):
        sizes[batch.axis] = "N" if batch.factor == 1 else f"{batch.factor}N"
    return "x".join(sizes) or "scalar"
