"""Insert the gate that chooses each gated block's precision, and the select that lets samples skip the block."""

from __future__ import annotations

import operator
from functools import partial

from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fractrain_fx.config import FracConfig
from fractrain_fx.errors import PassError
from fractrain_fx.native.choice import kernel_devices
from fractrain_fx.nn.gate_kernels import BlockEmbeddingByKernels, ControllerByKernels
from fractrain_fx.nn.gates import BlockEmbedding, Controller, Skip
from fractrain_fx.passes.graph.branches import is_sum
from fractrain_fx.passes.graph.contractions import function_name
from fractrain_fx.passes.graph.edit import call, identifier, insert_module, owner_module
from fractrain_fx.passes.graph.facts import Block, blocks_of, choices_of, facts, ops_of

__all__ = ["InsertGates", "block_embedding"]


class InsertGates(PassBase):
    """Insert embedding, controller and skip select of each gated block; thread the LSTM state from block to block.

    Requires: decided precisions. Ensures: each gated block has one choice node, ahead of all its ops.
    """

    def __init__(self, config: FracConfig) -> None:
        super().__init__()
        self.config = config

    def requires(self, graph_module: GraphModule) -> None:
        if choices_of(graph_module.graph):
            raise PassError("the graph already has gates: InsertGates runs once on a graph")

    def call(self, graph_module: GraphModule) -> PassResult:
        nodes = {node.name: node for node in graph_module.graph.nodes}
        blocks = [block for block in blocks_of(graph_module.graph) if block.gated]
        if not blocks:
            return PassResult(graph_module, False)
        options = self.config.gate_options
        devices = kernel_devices(self.config)
        kind = partial(ControllerByKernels, kernels=devices) if devices else Controller
        insert_module(graph_module, "controller", lambda: kind(self.config.gate, len(options)))
        state: Node | None = None
        latest: Node | None = None
        for block in blocks:
            after = _later(graph_module.graph, nodes[block.entry], latest)
            choice, state = self._gate(graph_module, block, nodes[block.entry], after, state)
            latest = state
            if block.skip is not None and options[0].skips:
                self._skip(graph_module, block, nodes, choice)
        return PassResult(graph_module, True)

    def _gate(
        self, graph_module: GraphModule, block: Block, entry: Node, after: Node, state: Node | None
    ) -> tuple[Node, Node]:
        graph = graph_module.graph
        skippable = block.skip is not None or not self.config.gate_options[0].skips
        path = f"gates.{identifier(block.name)}"
        insert_module(graph_module, path, lambda: block_embedding(graph_module, block, entry, self.config))
        batch = facts(entry).batch
        samples = [self._samples(graph)] if batch is not None and batch.folded else []
        with graph.inserting_after(after):
            embedded = call(graph, path, [entry, *samples], role="gate", owner=block.name)
        with graph.inserting_after(embedded):
            chosen = call(graph, "controller", [embedded, state, skippable], role="gate", owner=block.name)
        with graph.inserting_after(chosen):
            choice = graph.call_function(operator.getitem, (chosen, 0))
        with graph.inserting_after(choice):
            state = graph.call_function(operator.getitem, (chosen, 1))
        facts(choice).role, facts(choice).owner = "choice", block.name
        facts(state).role, facts(state).owner = "gate", block.name
        return choice, state

    def _samples(self, graph: Graph) -> Node | None:
        """A node with the number of samples, which entries with several rows a sample need; ``None``: as recorded."""
        inputs = graph.find_nodes(op="placeholder")
        for node in inputs:
            batch = facts(node).batch
            if batch is None or batch.folded or batch.whole:
                continue
            known: list[Node] = [
                u for u in node.users if u.op == "call_method" and u.target == "size" and facts(u).role == "samples"
            ]
            if known:
                return known[0]
            with graph.inserting_after(inputs[-1]):
                size: Node = graph.call_method("size", (node, batch.axis))
            facts(size).role, facts(size).owner = "samples", "model"
            return size
        return None

    def _skip(self, graph_module: GraphModule, block: Block, nodes: dict[str, Node], choice: Node) -> None:
        for name in block.branches:
            branch = nodes[name]
            batch = facts(branch).batch
            if batch is None:
                raise PassError(f"branch {name!r} of block {block.name!r} has no row for each sample")
            sums = [user for user in branch.users if is_sum(user)]
            path = f"skips.{identifier(block.name)}"
            insert_module(graph_module, path, partial(Skip, batch))
            with graph_module.graph.inserting_after(branch):
                skip = call(graph_module.graph, path, [branch, choice], role="skip", owner=block.name, like=branch)
            for add in sums:
                add.replace_input_with(branch, skip)

    def ensures(self, graph_module: GraphModule) -> None:
        position = {node: index for index, node in enumerate(graph_module.graph.nodes)}
        choices = choices_of(graph_module.graph)
        for node, op in ops_of(graph_module.graph):
            if op.precision.mode == "gated" and position[choices[op.block or ""]] > position[node]:
                raise PassError(f"op {op.name!r} runs before the gate of its block {op.block!r} has chosen")
        graph_module.graph.lint()


def block_embedding(graph_module: GraphModule, block: Block, entry: Node, config: FracConfig) -> BlockEmbedding:
    """The embedding of a block's entry, sized for the features of that entry."""
    record = facts(entry)
    if record.shape is None or record.batch is None:
        raise PassError(f"the entry {entry.name!r} of block {block.name!r} has no row for each sample")
    axis = _feature_axis(graph_module, entry, block)
    together = record.batch.folded and axis == record.batch.axis
    features = record.batch.factor if together else record.shape[axis]
    devices = kernel_devices(config)
    kind = partial(BlockEmbeddingByKernels, kernels=devices) if devices else BlockEmbedding
    return kind(features, axis, record.batch, config.gate.dims, config.gate.init)


def _later(graph: Graph, first: Node, second: Node | None) -> Node:
    """Whichever of two nodes comes later (past the inputs, which must stay first)."""
    later = first
    if second is not None and first < second:
        later = second
    while later.op == "placeholder" and later.next.op == "placeholder":
        later = later.next
    return later


def _feature_axis(graph_module: GraphModule, entry: Node, block: Block) -> int:
    """The dimension of a block's entry that holds its features, as the first module or product that reads it tells."""
    visited, queue = {entry}, [entry]
    ndim = len(facts(entry).shape or ())
    while queue:
        node = queue.pop(0)
        for user in node.users:
            if user in visited:
                continue
            visited.add(user)
            axis = _reads_features(graph_module, user)
            if axis is not None and len(facts(node).shape or ()) == ndim:
                return axis % ndim
            if facts(user).shape is not None and len(facts(user).shape or ()) == ndim:
                queue.append(user)
    batch = facts(entry).batch
    return 1 if ndim == 4 and (batch is None or batch.axis != 1) else ndim - 1


def _reads_features(graph_module: GraphModule, node: Node) -> int | None:
    owner = owner_module(graph_module, node)
    name = function_name(node)
    if isinstance(owner, nn.modules.batchnorm._NormBase | nn.GroupNorm) or name.startswith(("conv", "batch_norm")):
        return 1
    if isinstance(owner, nn.LayerNorm) or name in ("linear", "addmm", "layer_norm", "rms_norm"):
        return -1
    return None
