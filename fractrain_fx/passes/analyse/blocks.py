"""Group the contractions into blocks: residual blocks with a skip path, and the rest by module without one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fractrain_fx.errors import PassError
from fractrain_fx.passes.analyse.residual import residuals
from fractrain_fx.passes.graph.contractions import OPAQUE_KINDS, UNSPLIT_KINDS, contraction, operand
from fractrain_fx.passes.graph.edit import unique
from fractrain_fx.passes.graph.facts import Block, Op, facts, ops_of

__all__ = ["Blocks", "can_choose"]

# A module that issues more contractions than this outside residual blocks is a network, not a layer group.
_LARGEST_GROUP = 6

Found = tuple[Node, Op]


class Blocks(PassBase):
    """Give every counted contraction its block (paper 3.2: a gate chooses for a layer or block).

    Requires: shapes and ops. Ensures: each counted op that depends on the input is in one block.
    """

    def requires(self, graph_module: GraphModule) -> None:
        if not any(True for _ in ops_of(graph_module.graph)):
            raise PassError("the graph has no contractions annotated: run the Macs pass before Blocks")

    def call(self, graph_module: GraphModule) -> PassResult:
        names: set[str] = set()
        for node in graph_module.graph.nodes:
            facts(node).blocks = ()
        counted = [(node, op) for node, op in ops_of(graph_module.graph) if can_choose(op)]
        for residual in residuals(graph_module):
            inside = [(node, op) for node, op in counted if node in residual.region]
            if not inside:
                continue
            name = unique(residual.path or "model", names)
            names.add(name)
            for node, op in inside:
                op.skip_path = node in residual.projection
            _add(inside, name, residual.entry, residual.exit, residual.skip, residual.branches)
        for group, members in _groups(graph_module, [pair for pair in counted if pair[1].block is None]).items():
            name = unique(group, names)
            names.add(name)
            first, last = members[0][0], members[-1][0]
            family = contraction(first)
            assert family is not None
            _add(members, name, operand(first, family.operands[0]), last)
        return PassResult(graph_module, True)


def can_choose(op: Op) -> bool:
    """Whether both operands can be quantized: not in a module kept as one node, nor in a call of several factors."""
    return op.macs is not None and op.kind not in (*OPAQUE_KINDS, *UNSPLIT_KINDS)


def _add(
    members: list[Found],
    name: str,
    entry: Node,
    exit_node: Node,
    skip: Literal["identity", "projection"] | None = None,
    branches: Sequence[tuple[Node, Node]] = (),
) -> None:
    """Note a block at its exit, and its name in its ops."""
    block = Block(
        name=name,
        entry=entry.name,
        exit=exit_node.name,
        skip=skip,
        ops=tuple(op.name for _, op in members),
        macs=sum(op.macs or 0 for _, op in members),
        branches=tuple(branch.name for branch, _ in branches),
    )
    for _, op in members:
        op.block = name
    facts(exit_node).blocks += (block,)


def _groups(graph_module: GraphModule, left: list[Found]) -> dict[str, list[Found]]:
    """The contractions outside residual blocks, grouped by the module that is their layer."""
    sizes = Counter(_layer(graph_module, op) for _, op in left)
    groups: dict[str, list[Found]] = {}
    for node, op in left:
        layer = _layer(graph_module, op)
        grouped = layer and 1 < sizes[layer] <= _LARGEST_GROUP
        groups.setdefault(layer if grouped else op.name, []).append((node, op))
    return groups


def _layer(graph_module: GraphModule, op: Op) -> str:
    """The nearest module above an op that is neither the op's own layer nor a mere container."""
    path = op.module
    module = graph_module.get_submodule(path)
    if not any(True for _ in module.children()):
        path = path.rpartition(".")[0]
    while path and isinstance(graph_module.get_submodule(path), nn.Sequential | nn.ModuleList | nn.ModuleDict):
        path = path.rpartition(".")[0]
    return path
