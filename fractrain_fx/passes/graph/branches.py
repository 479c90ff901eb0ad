"""Find the nodes that only a block's branch needs: they need not run for samples that skip the block."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.fx import Graph, Node

from fractrain_fx.capture import RecordedModule
from fractrain_fx.capture.recording.hooks import HOOKS
from fractrain_fx.capture.recording.regions import REGION_EDGES, REGIONS
from fractrain_fx.capture.targets import ADDS
from fractrain_fx.execution.blocks.dispatched_block import Adding, Given
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.passes.graph.aliases import base, memory_of, written
from fractrain_fx.passes.graph.contractions import function_name
from fractrain_fx.passes.graph.edit import NAMESPACE, copied, nodes_until, owner_module
from fractrain_fx.passes.graph.facts import Block, facts, fixed_batch

__all__ = ["Part", "ends_of", "inseparable", "is_sum", "part_of", "skippable"]

_ADDS_IN_PLACE = frozenset({"iadd", "add_", "__iadd__"})


@dataclass(frozen=True)
class Part:
    """Nodes that run only for a branch, in order; the last one gives the branch's value.

    With gates that is the skip select. ``given`` tells how each input depends on the samples, ``axis`` is the batch
    axis. The branch is added to the skip path ``onto`` at the node ``add``; ``adding`` tells how the add can be made
    part of it.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    given: tuple[Given, ...]
    axis: BatchAxis
    onto: Node
    adding: Adding
    add: Node

    @property
    def end(self) -> Node:
        """The node that gives the branch."""
        return self.nodes[-1]

    def module(self, graph_module: RecordedModule) -> RecordedModule:
        """The nodes as a separate graph, on the modules and parameters of the whole."""
        graph, values = copied(self.inputs, self.nodes)
        graph.output(values[self.end])
        return RecordedModule.over(graph_module, graph_module._modules, graph)


def skippable(graph: Graph) -> list[Block]:
    """The blocks that a gate may skip."""
    return [block for node in graph.nodes for block in facts(node).blocks if block.gated and block.skip is not None]


def ends_of(graph: Graph) -> dict[Node, Block]:
    """The last node of each branch that can be skipped: its skip select or, in a graph without gates, its value."""
    blocks = {block.name: block for block in skippable(graph)}
    selects = {node: blocks[owner] for node in graph.nodes if (owner := _skips(node)) in blocks}
    branches = {name: block for block in blocks.values() for name in block.branches}
    return selects or {node: branches[node.name] for node in graph.nodes if node.name in branches}


def is_sum(node: Node) -> bool:
    """Whether a node adds its operands, alone or as ``stack`` followed by ``sum``: a branch of 0 then adds nothing."""
    if function_name(node) == "stack":
        return all(function_name(user) == "sum" for user in node.users)
    return function_name(node) in ADDS


def _skips(node: Node) -> str:
    """The name of the block whose skip select this node is; empty if it is not one."""
    return facts(node).owner or "" if facts(node).role == "skip" else ""


def inseparable(graph_module: RecordedModule) -> str | None:
    """The reason that no block of the graph can run for a part of the samples; ``None`` if there is none."""
    if fixed_batch(graph_module):
        return "the model runs at one batch size only"
    if any((axis := facts(node).batch) and axis.folded for node in graph_module.graph.find_nodes(op="placeholder")):
        return "samples may have different numbers of rows"
    return None


def part_of(graph_module: RecordedModule, block: Block, end: Node) -> Part | str:
    """The nodes that only the branch ending at ``end`` needs, or the reason it must run for all samples."""
    if (reason := inseparable(graph_module)) is not None:
        return reason
    axis = facts(end).batch
    adds = [user for user in end.users if function_name(user) in ADDS]
    if len(end.users) != 1 or len(adds) != 1 or axis is None:
        return f"{end.name} is read by more than the residual add"
    try:
        return _Finder(graph_module, block, end, adds[0]).part(axis)
    except _TogetherError as reason:
        return str(reason)


class _TogetherError(Exception):
    """A branch must run for all samples; the message is the reason."""


class _Finder:
    """Looks for the part of one branch."""

    def __init__(self, graph_module: RecordedModule, block: Block, end: Node, add: Node) -> None:
        self._graph_module, self._graph = graph_module, graph_module.graph
        self._block, self._end, self._add = block, end, add

    def part(self, axis: BatchAxis) -> Part:
        onto, adding = self._skip_path()
        if facts(onto).shape != facts(self._end).shape:
            raise _TogetherError(f"{onto.name}, which it is added to, has another shape")
        region = self._region()
        if not any(facts(node).op is not None for node in region):
            raise _TogetherError(f"no contraction is needed for {self._end.name} alone")
        for node in region:
            self._refuse(node, region)
        region |= self._settings(region)
        nodes = sorted(region)
        inputs = tuple(dict.fromkeys(x for node in nodes for x in node.all_input_nodes if x not in region))
        self._refuse_writers(nodes[0], region, inputs)
        return Part(tuple(nodes), inputs, tuple(map(self._given, inputs)), axis, onto, adding, self._add)

    def _skip_path(self) -> tuple[Node, Adding]:
        """The value that the branch is added to, and how the add can be made part of the branch."""
        add, end = self._add, self._end
        operands = [term for term in add.args if isinstance(term, Node)]
        others = [term for term in operands if term is not end]
        name = function_name(add)
        if add.kwargs or len(operands) != 2 or len(others) != 1 or len(add.args) != 2:
            raise _TogetherError(f"{add.name} does more than add two tensors")
        if _skips(others[0]) == self._block.name or others[0].name in self._block.branches:
            # Two branches are added first. The entry has the shape of their sum, so it can stand for the sum.
            return self._entry(), "elsewhere"
        if name not in _ADDS_IN_PLACE:
            return others[0], "new"
        return others[0], "in place" if operands[0] is end else "elsewhere"

    def _entry(self) -> Node:
        """The node that the gate reads, or will read."""
        named = f"{NAMESPACE}.gates."
        nodes: list[Node] = list(self._graph.nodes)
        for node in nodes:
            if node.name == self._block.entry:
                return node
            if str(node.target).startswith(named) and facts(node).owner == self._block.name:
                return base(node) or node
        raise _TogetherError(f"its entry {self._block.entry} is gone")

    def _region(self) -> set[Node]:
        """All nodes whose every use leads into the branch."""
        barred: set[Node] = set()
        while True:
            region = self._closed(barred)
            outside = {node for node in region if self._belongs_outside(node, region)}
            if not outside:
                return region
            barred |= outside

    def _closed(self, barred: set[Node]) -> set[Node]:
        region, queue = {self._end}, [self._end]
        while queue:
            for source in queue.pop().all_input_nodes:
                if source in region or source in barred or source.op == "placeholder":
                    continue
                if all(user in region for user in source.users):
                    region.add(source)
                    queue.append(source)
        return region

    def _belongs_outside(self, node: Node, region: set[Node]) -> bool:
        """Whether a node must run for all samples: a range of a shared input, or a reader of one item of a tuple."""
        if node is self._end:
            return False
        if facts(node).role == "range":
            return node.args[0] not in region
        outside = [source for source in node.all_input_nodes if source not in region]
        return any(facts(x).tensors and facts(x).shape is None for x in outside)

    def _refuse(self, node: Node, region: set[Node]) -> None:
        record = facts(node)
        if isinstance(owner_module(self._graph_module, node), nn.SyncBatchNorm):
            raise _TogetherError(f"{node.target} waits for other processes, which may skip it")
        if function_name(node) in HOOKS:
            raise _TogetherError(f"{node.name} sees the gradient of all samples")
        if any(not memory_of(operand) <= region for operand in written(node)):
            raise _TogetherError(f"{node.name} changes a value in place that is needed elsewhere")
        apart = record.batch is not None or record.shape is None or record.role in ("weight", "bits")
        if apart or not any(facts(x).batch is not None for x in node.all_input_nodes):
            return
        if record.samples is not None:
            raise _TogetherError(f"the order of the samples in {node.name} is not known")
        if record.flows or not function_name(node).startswith("new_"):
            raise _TogetherError(f"{node.name} mixes samples")

    def _settings(self, region: set[Node]) -> set[Node]:
        """Starts and ends of settings of torch around nodes of the region."""
        settings: set[Node] = set()
        starts = [node for begin in REGIONS for node in self._graph.find_nodes(op="call_function", target=begin)]
        for start in starts:
            stop = next(iter(start.users))
            between = list(nodes_until(start.next, stop))
            if not any(node in region for node in between):
                continue
            if not all(node in region or node.op == "get_attr" or node.target in REGION_EDGES for node in between):
                raise _TogetherError(f"it shares a setting of torch ({start.name}) with other parts of the model")
            settings |= {start, stop}
        return settings

    def _refuse_writers(self, first: Node, region: set[Node], inputs: tuple[Node, ...]) -> None:
        """Refuse a node between the branch's first node and the add that changes an input of the branch in place."""
        read = {memory for node in inputs for memory in memory_of(node)}
        for node in nodes_until(first, self._add):
            if node not in region and any(not memory_of(operand).isdisjoint(read) for operand in written(node)):
                raise _TogetherError(f"{node.name} changes in place a value that it reads")

    def _given(self, node: Node) -> Given:
        record = facts(node)
        if record.role == "choice" or (record.role == "bits" and node.op == "call_function"):
            return BatchAxis()
        if record.batch is not None:
            if record.batch.whole:
                raise _TogetherError(f"{node.name} holds all samples at once")
            return record.batch
        if record.role == "samples":
            return "count"
        if record.role is not None or node.op == "get_attr":
            return None
        if record.samples is not None:
            raise _TogetherError(f"the order of the samples in {node.name} is not known")
        if record.tensors:
            return None
        if record.grows is None:
            raise _TogetherError(f"{node.name} may depend on the number of samples")
        return "count" if record.grows else None
