"""Let fused ops make operands again in backward instead of keeping them, in the copy of the graph that runs."""

from __future__ import annotations

from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fractrain_fx.execution.attention import Probabilities
from fractrain_fx.execution.fused_op import FusedOp
from fractrain_fx.execution.remade import Made, ModuleMaker, can_run_again
from fractrain_fx.nn.attention import attention_probabilities
from fractrain_fx.passes.graph.aliases import Writes, base, is_view
from fractrain_fx.passes.graph.edit import NAMESPACE, graphs_of, insert_module, original_at, owner_module
from fractrain_fx.passes.graph.facts import facts

__all__ = ["RemakeOperands"]


class RemakeOperands(PassBase):
    """Give each fused op whose first operand is a norm's or GELU's output the tensor that it was made from.

    Attention's probabilities, which an op multiplies by the values, are made again from queries and keys. An output
    that another node writes into before the op reads it is kept.

    Requires: a graph after ``Fuse``. Ensures: values and gradients stay the same bit for bit.
    """

    def call(self, graph_module: GraphModule) -> PassResult:
        changed = [_connect(graph) for graph in graphs_of(graph_module)]
        return PassResult(graph_module, any(changed))


def _connect(graph_module: GraphModule) -> bool:
    writes = Writes(graph_module.graph)
    changed = False
    for node in graph_module.graph.nodes:
        fused = owner_module(graph_module, node)
        if not isinstance(fused, FusedOp):
            continue
        fused.maker = None
        if (probabilities := _probabilities(graph_module, node, fused)) is not None:
            fused.maker = _replaced(graph_module, probabilities)
            source, value = probabilities.args[0], node.kwargs["a"]
        elif (module := _module(graph_module, node.kwargs["a"])) and not _is_written(writes, module, node):
            fused.maker = ModuleMaker(original_at(graph_module, module))
            source, value = module.args[0], module
        if fused.maker is not None:
            node.kwargs = {**node.kwargs, "made": Made(source, value)}  # type: ignore[arg-type]
            changed = True
    if changed:
        graph_module.graph.lint()
        graph_module.recompile()
    return changed


def _module(graph_module: GraphModule, operand: Node | None) -> Node | None:
    """The call of a module in whose output an operand may lie, if it can be made again."""
    while operand is not None and not can_run_again(owner_module(graph_module, operand)):
        same = isinstance(owner_module(graph_module, operand), nn.Identity | nn.Dropout) or is_view(operand)
        operand = base(operand) if same else None
    return operand if operand is not None and len(operand.args) == 1 and not operand.kwargs else None


def _is_written(writes: Writes, value: Node, reader: Node) -> bool:
    """Whether a node between a value and its reader may change the value."""
    last = writes.last(value, reader)
    return last is not None and last > value


def _probabilities(graph_module: GraphModule, node: Node, fused: FusedOp) -> Node | None:
    """The call that makes the probabilities which an op reads, if backward can make them again.

    It can if only the op keeps them, and the product of queries and keys is a fused op that keeps both.
    """
    probabilities = node.kwargs["a"]
    if not isinstance(probabilities, Node) or probabilities.target is not attention_probabilities:
        return None
    scores = owner_module(graph_module, probabilities.args[0])  # type: ignore[arg-type]
    readers = {user for user in probabilities.users if facts(user).role != "range"}
    plain = isinstance(scores, FusedOp) and not (scores.plan.first.weight or scores.plan.second.weight)
    return probabilities if plain and readers == {node} else None


def _replaced(graph_module: GraphModule, node: Node) -> Probabilities:
    """The module in the place of a call of :func:`attention_probabilities`."""
    scores = node.args[0]
    assert isinstance(scores, Node)
    op = owner_module(graph_module, scores)
    assert isinstance(op, FusedOp)
    path = f"{str(scores.target).removeprefix(f'{NAMESPACE}.')}_probabilities"
    module = insert_module(graph_module, path, lambda: Probabilities(op))
    factors = (*scores.args, *(scores.kwargs[name] for name in ("a", "b", "added")))
    node.op, node.target = "call_module", f"{NAMESPACE}.{path}"
    node.args, node.kwargs = (*node.args, dict(node.kwargs), factors), {}
    return module
