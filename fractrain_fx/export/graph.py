"""What is deployed: the original with rounded layers, or the evaluation graph without gates, gradients and costs."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from fractrain_fx.capture import RecordedModule, Recording
from fractrain_fx.capture.inputs.examples_hf import is_hugging_face
from fractrain_fx.errors import InputError
from fractrain_fx.execution.arithmetic import Arithmetic, Bound
from fractrain_fx.execution.fused_op import FusedOp
from fractrain_fx.export.factors import FrozenFactor, FrozenOp
from fractrain_fx.export.layers import attention_names, attentions, layers, with_rounded_layers
from fractrain_fx.nn.quantizers import picked
from fractrain_fx.passes import facts
from fractrain_fx.passes.graph.branches import is_sum
from fractrain_fx.passes.graph.contractions import contraction, set_operand
from fractrain_fx.passes.graph.edit import NAMESPACE

__all__ = ["DeployedGraph", "ModuleOf", "RoundedProduct", "deploy", "frozen_graph", "plain_module"]

ModuleOf = Callable[[FrozenFactor], nn.Module]
"""Makes the module that stands for a factor: from its values to the rounded ones, or for a weight from nothing."""

_PLACE = "rounded"
_INSERTED = ("bits", "seed", "gate", "choice", "samples", "range", "cost", "input", "weight")


class RoundedWeight(nn.Module):
    """A weight with its rounded values."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(values, requires_grad=False)

    def forward(self) -> Tensor:
        """The values."""
        return self.values


class _ComputedWeight(nn.Module):
    """Rounds a weight that the graph computes, such as a transposed one."""

    def __init__(self, factor: FrozenFactor) -> None:
        super().__init__()
        self.rounding = factor.weight_rounding

    def forward(self, w: Tensor) -> Tensor:
        """The rounded values."""
        return self.rounding.rounded(w)


class RoundedProduct(nn.Module):
    """A product of two rounded factors."""

    def __init__(self, arithmetic: Arithmetic, static: tuple[Any, ...]) -> None:
        super().__init__()
        self.arithmetic, self.static = arithmetic, static

    def forward(self, a: Tensor, b: Tensor, added: Tensor | None) -> Tensor:
        """The product."""
        return self.arithmetic.forward(Bound(a, b, added, self.static))


def plain_module(factor: FrozenFactor) -> nn.Module:
    """The module that computes a factor by torch operations."""
    if not factor.weight:
        return factor.rounding()
    return _ComputedWeight(factor) if factor.value is None else RoundedWeight(factor.rounded_weight())


@torch.no_grad()
def frozen_graph(
    original: nn.Module,
    shown: RecordedModule,
    ops: Sequence[FrozenOp],
    module_of: ModuleOf = plain_module,
    skipped: Collection[str] = (),
) -> GraphModule:
    """A graph module of its own that computes as evaluation does.

    Args:
        original: the model that was recorded.
        shown: its evaluation graph, with quantize nodes.
        ops: what :func:`fractrain_fx.export.factors.frozen_ops` read from it.
        module_of: makes the module for each factor that is rounded.
        skipped: blocks that every sample skips.
    """
    # One copy of both, because inserted modules refer to modules of the original.
    root, inserted = copy.deepcopy((original, shown.get_submodule(NAMESPACE)))
    root.add_module(NAMESPACE, inserted)
    root.add_module(_PLACE, nn.Module())
    graph = copy.deepcopy(shown.graph)
    named = {node.name: node for node in graph.nodes}
    writer = _Writer(graph, root, module_of)
    for op in ops:
        writer.write(named[op.node.name], op, [named[factor.source.name] for factor in op.factors])
    for node in list(graph.nodes):
        if facts(node).role == "gradient":
            node.replace_all_uses_with(node.args[0])
        elif facts(node).role == "skip":
            _settle_skip(node, facts(node).owner in skipped)
    output = next(iter(graph.find_nodes(op="output")))
    if facts(output.args[0][1] if isinstance(output.args[0], tuple) else output).role == "cost":
        output.args = (output.args[0][0],)
    _erase(graph)
    graph.lint()
    module = GraphModule(root, graph, f"Deployed{type(original).__name__}").eval().requires_grad_(False)
    if skipped:
        module.graph.eliminate_dead_code()
        module.recompile()
        module.delete_all_unused_submodules()
    return module


class _Writer:
    """Puts modules of frozen factors into a graph."""

    def __init__(self, graph: Graph, root: nn.Module, module_of: ModuleOf) -> None:
        self._graph, self._module_of = graph, module_of
        self._place = root.get_submodule(_PLACE)
        self._root = root
        self._made: dict[tuple[Any, ...], Node] = {}

    def write(self, node: Node, op: FrozenOp, sources: Sequence[Node]) -> None:
        factors = [self._factor(node, *pair) for pair in zip(op.factors, sources, strict=True)]
        if node.op != "call_module":
            family = contraction(node)
            assert family is not None
            for place, factor in zip(family.operands, factors, strict=True):
                set_operand(node, place, factor)
            return
        fused = self._root.get_submodule(str(node.target))
        assert isinstance(fused, FusedOp)
        name = self._add(RoundedProduct(fused.plan.arithmetic, fused.plan.static))
        with self._graph.inserting_before(node):
            product = self._graph.call_module(name, (*factors, node.kwargs["added"]))
        product.meta = dict(node.meta)
        node.replace_all_uses_with(product)
        self._graph.erase_node(node)

    def _factor(self, node: Node, factor: FrozenFactor, source: Node) -> Node:
        if not factor.is_rounded:
            return source
        key = (source, factor.quantizer, factor.bits)
        if key not in self._made:
            arguments = () if factor.value is not None and factor.weight else (source,)
            with self._graph.inserting_before(node):
                self._made[key] = self._graph.call_module(self._add(self._module_of(factor)), arguments)
        return self._made[key]

    def _add(self, module: nn.Module) -> str:
        name = str(len(self._place._modules))
        self._place.add_module(name, module)
        return f"{_PLACE}.{name}"


def _settle_skip(node: Node, skips: bool) -> None:
    """Replace the select of a block by its branch, or by nothing."""
    branch: Any = node.args[0]
    if not skips:
        node.replace_all_uses_with(branch)
        return
    for user in list(node.users):
        others = [other for other in user.all_input_nodes if other is not node]
        if is_sum(user) and len(others) == 1 and facts(others[0]).shape == facts(user).shape:
            user.replace_all_uses_with(others[0])
            user.graph.erase_node(user)
    with node.graph.inserting_before(node):
        node.replace_all_uses_with(node.graph.call_function(torch.zeros_like, (branch,)))


def _erase(graph: Graph) -> None:
    """Erase what only training reads."""
    for node in reversed(list(graph.nodes)):
        if node.users or node.op in ("placeholder", "output"):
            continue
        role = facts(node).role
        part = node.op == "get_attr" or node.target in (picked, operator.getitem, torch.zeros_like)
        if part or role in (*_INSERTED, "gradient", "skip"):
            graph.erase_node(node)


class DeployedGraph(nn.Module):
    """A model as the graph that evaluation computes, for calls like the recorded one.

    Args:
        graph: the frozen graph.
        recording: it was made from.
    """

    def __init__(self, graph: GraphModule, recording: Recording) -> None:
        super().__init__()
        self.graph = graph
        self._call = recording.call
        self._guards = recording.guards[False]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output, in the structure that the original gives.

        Raises:
            InputError: code of the original would take another path for this call.
        """
        values = self._call.bind(args, kwargs)
        if not torch.compiler.is_compiling():
            guard = self._guards.failed_guard(values, self.graph, self.graph)
            if guard is not None:
                raise InputError(
                    f"this model was deployed for calls that meet {guard} ({guard.place}): call deployed() again on "
                    "a model that was recorded with such inputs (fractrainify(..., example_inputs=...))"
                )
        return self.graph(*values)


def deploy(original: nn.Module, recording: Recording, ops: Sequence[FrozenOp], skipped: Collection[str]) -> nn.Module:
    """The original class with rounded layers, if that covers all products, else the evaluation graph.

    A model of Hugging Face's always keeps its class, so that ``generate`` works; its products that stay float are named
    in ``float_products``.

    Args:
        original: the model that was recorded.
        recording: with its shown graphs.
        ops: its rounded products.
        skipped: blocks that every sample skips.
    """
    rounded, attention = layers(original, ops), attentions(ops)
    names = {*(op.name for op in rounded.values()), *attention_names(attention)}
    left = tuple(op.name for op in ops if op.name not in names)
    if skipped or (left and not is_hugging_face(original)):
        deployed: Any = DeployedGraph(frozen_graph(original, recording.eval, ops, skipped=skipped), recording).eval()
        left = ()
    else:
        deployed = with_rounded_layers(original, rounded, attention)
    deployed.float_products = left
    return deployed  # type: ignore[no-any-return]
