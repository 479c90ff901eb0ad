"""Make one op of each quantize / contract / quantize group, for the copy of the graph that runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fractrain_fx.errors import PassError
from fractrain_fx.execution.arithmetic import GroupedMatMul
from fractrain_fx.execution.fused_op import FusedOp
from fractrain_fx.execution.grouped_op import GroupedOp
from fractrain_fx.nn.quantizers import ActivationQuantizer, GradientQuantizer, WeightQuantizer, picked
from fractrain_fx.passes.graph.arithmetic import arithmetic_of
from fractrain_fx.passes.graph.contractions import contraction, operand
from fractrain_fx.passes.graph.edit import NAMESPACE, call, graphs_of, insert_module, owner_module
from fractrain_fx.passes.graph.facts import Block, Role, facts, ops_of

__all__ = ["Fuse", "fused_ops", "require_fused", "unfused"]

_QUANTIZERS: Mapping[Role | None, type[nn.Module]] = {
    "input": ActivationQuantizer,
    "weight": WeightQuantizer,
    "gradient": GradientQuantizer,
}
"""The kind of module that the nodes of each role call."""

Group = tuple[list[Node], Node]
"""The quantize nodes of a contraction's factors, and that of its gradient."""


class Fuse(PassBase):
    """Replace each quantized contraction and the quantize nodes around it by one :class:`FusedOp`.

    The range of an activation stays a node, so that ops that share an activation measure it once. A group without a
    fused form (:func:`unfused` says why) stays as it is.

    Requires: a graph after the Quantize pass. Ensures: the values stay the same; no fused op is left with a quantize
    node beside it.

    Args:
        per_product: fuse only ops whose format rounds operands anew for each product, which have no unfused form.
    """

    def __init__(self, *, per_product: bool = False) -> None:
        super().__init__()
        self._per_product = per_product

    def requires(self, graph_module: GraphModule) -> None:
        for node in graph_module.graph.nodes:
            kind = _QUANTIZERS.get(facts(node).role)
            if kind is not None and not isinstance(owner_module(graph_module, node), kind):
                raise PassError(f"the quantize node {node.name!r} does not call a quantizer: run Quantize first")

    def call(self, graph_module: GraphModule) -> PassResult:
        groups = _groups(graph_module)
        if self._per_product:
            groups = {node: group for node, group in groups.items() if _per_product(graph_module, group)}
        apart = _not_fusible(groups)
        shared = _Shared(graph_module)
        fusible = {node: group for node, group in groups.items() if node not in apart}
        fused = {node.name: _fuse(graph_module, node, group, shared).name for node, group in fusible.items()}
        for node in graph_module.graph.nodes:
            if blocks := facts(node).blocks:
                # In a new record: a copied graph shares records with the graph it is a copy of.
                node.meta["frac"] = replace(facts(node), blocks=tuple(_renamed(block, fused) for block in blocks))
        graph_module.graph.lint()
        graph_module.recompile()
        return PassResult(graph_module, len(apart) < len(groups))


def unfused(graph_module: GraphModule) -> dict[str, str]:
    """By name, the quantized ops of a graph that have no fused form, with the reason."""
    groups = _groups(graph_module)
    return {facts(node).op.name: reason for node, reason in _not_fusible(groups).items()}  # type: ignore[union-attr]


def fused_ops(graph_module: GraphModule) -> dict[str, FusedOp]:
    """By name, the fused ops of a graph and of the branches that were taken out of it."""
    fused: dict[str, FusedOp] = {}
    for graph in graphs_of(graph_module):
        for node, op in ops_of(graph.graph):
            module = owner_module(graph, node)
            if isinstance(module, FusedOp):
                fused[op.name] = module
    return fused


def require_fused(graph_module: GraphModule) -> None:
    """Check that :class:`Fuse` has run on a graph."""
    groups = _groups(graph_module)
    for node in groups.keys() - _not_fusible(groups).keys():
        raise PassError(f"{node.name!r} is not fused with the quantize nodes around it yet: run Fuse first")


def _groups(graph_module: GraphModule) -> dict[Node, Group]:
    """The contractions with quantize nodes around them."""
    return {node: group for node in graph_module.graph.nodes if (group := _group(node)) is not None}


def _group(node: Node) -> Group | None:
    """The group around a contraction; ``None`` if a quantize node is missing."""
    family = contraction(node)
    if family is None or facts(node).op is None:
        return None
    factors = [operand(node, place) for place in family.operands]
    after = [user for user in node.users if facts(user).role == "gradient"]
    if len(after) != 1 or len(node.users) != 1 or any(facts(f).role not in ("input", "weight") for f in factors):
        return None
    return factors, after[0]


def _per_product(graph_module: GraphModule, group: Group) -> bool:
    return bool(graph_module.get_submodule(str(group[1].target)).fmt.per_product)  # type: ignore[union-attr]


def _not_fusible(groups: Mapping[Node, Group]) -> dict[Node, str]:
    """The groups that stay unfused, with the reason. So does a group that shares a rounded activation with one."""
    apart = {node: arithmetic for node in groups if isinstance(arithmetic := arithmetic_of(node), str)}
    fusible = groups.keys() - apart.keys()
    changed = True
    while changed:
        changed = False
        for node in sorted(fusible):
            factors, _ = groups[node]
            shared = [f for f in factors if facts(f).role == "input" and not fusible.issuperset(f.users)]
            if shared:
                fusible.remove(node)
                apart[node] = f"shares a rounded activation with {next(iter(shared[0].users)).name}, which is not fused"
                changed = True
    return apart


class _Shared:
    """Nodes that several fused ops read."""

    def __init__(self, graph_module: GraphModule) -> None:
        self._graph = graph_module.graph
        self._ranges: dict[Node, Node] = {}
        self._picked: dict[Node, Node] = {}

    def range(self, quantize: Node, owner: str) -> Node:
        """The range that a quantize node of an activation measures."""
        if quantize not in self._ranges:
            path = str(quantize.target).removeprefix(f"{NAMESPACE}.")
            with self._graph.inserting_before(quantize):
                node = call(self._graph, f"{path}.range", quantize.args[:1], role="range", owner=owner)
            self._ranges[quantize] = node
        return self._ranges[quantize]

    def picked(self, choice: Node) -> Node:
        """The node that gives each sample's picked option."""
        if choice not in self._picked:
            with self._graph.inserting_after(choice):
                self._picked[choice] = self._graph.call_function(picked, (choice,))
            facts(self._picked[choice]).role, facts(self._picked[choice]).owner = "bits", facts(choice).owner
        return self._picked[choice]


def _fuse(graph_module: GraphModule, node: Node, group: Group, shared: _Shared) -> Node:
    graph, (factors, gradient) = graph_module.graph, group
    arithmetic, op = arithmetic_of(node), facts(node).op
    assert op is not None and not isinstance(arithmetic, str)
    quantizers: list[Any] = [owner_module(graph_module, quantizer) for quantizer in (*factors, gradient)]
    ends = [shared.range(factor, op.name) if facts(factor).role == "input" else None for factor in factors]
    path = f"fused.{str(gradient.target).split('.')[-2]}"
    bound = arithmetic.bind(node.args, node.kwargs)
    kind = GroupedOp if isinstance(arithmetic, GroupedMatMul) else FusedOp
    insert_module(graph_module, path, lambda: kind(arithmetic, bound.static, *quantizers))
    bits = [quantizer.args[1] for quantizer in (*factors, gradient)]
    choice = next((x for x in bits if isinstance(x, Node) and facts(x).role == "choice"), None)
    controls = tuple(shared.picked(x) if choice is not None and x is choice else x for x in bits)
    rounds = [controls, choice, tuple(ends), gradient.args[2]]
    tensors = {"a": bound.a.args[0], "b": bound.b.args[0], "added": bound.added}
    with graph.inserting_before(node):
        fused = call(graph, path, rounds, tensors, role="fused", owner=op.name, like=node)
    facts(fused).op, facts(fused).blocks, facts(fused).formula = op, facts(node).blocks, facts(node).formula
    gradient.replace_all_uses_with(fused)
    for spent in (gradient, node, *factors):
        if not spent.users and not spent._erased:
            graph.erase_node(spent)
    return fused


def _renamed(block: Block, fused: Mapping[str, str]) -> Block:
    """A block whose entry, exit and branches are the nodes that took the places of fused ones."""
    entry, exit, *branches = (fused.get(name, name) for name in (block.entry, block.exit, *block.branches))
    return replace(block, entry=entry, exit=exit, branches=tuple(branches))
