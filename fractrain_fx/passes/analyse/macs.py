"""Find every contraction and count its MACs for one sample."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import attrgetter, or_

from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fractrain_fx.capture.recording.kept.callees import Method
from fractrain_fx.capture.recording.kept.hidden import HIDDEN
from fractrain_fx.errors import ModelError, PassError
from fractrain_fx.nn.quantized_leaf import QuantizedLeaf
from fractrain_fx.passes.analyse.op_names import name_ops
from fractrain_fx.passes.analyse.products import product_of
from fractrain_fx.passes.analyse.trained import bits_of
from fractrain_fx.passes.graph.aliases import shares_memory, written
from fractrain_fx.passes.graph.contractions import (
    Contraction,
    contraction,
    factors_of,
    operand,
    uncounted_kind,
    unsplit,
)
from fractrain_fx.passes.graph.edit import module_path, owner_module, varying
from fractrain_fx.passes.graph.facts import Op, facts, ops_of
from fractrain_fx.passes.graph.formulas import recurrent_macs

__all__ = ["Macs", "macs_of"]


class Macs(PassBase):
    """Put an :class:`Op` into the record of each contraction.

    MACs are closed forms of the shapes, for one sample. An op whose output all samples share is counted once.
    An op that no gradient of the model's output reaches has no backward products.
    An op family without a formula gets ``macs=None`` and is listed as uncounted.

    Requires: shapes. Ensures: every contraction that depends on the input has an op with a unique name.

    Raises:
        ModelError: no op has a formula.
    """

    def requires(self, graph_module: GraphModule) -> None:
        if not any(facts(node).shape is not None for node in graph_module.graph.nodes):
            raise PassError("the graph has no shapes yet: run the Shapes pass before Macs")

    def call(self, graph_module: GraphModule) -> PassResult:
        moving, reached = varying(graph_module.graph), _reached_by_gradient(graph_module.graph)
        for node in graph_module.graph.nodes:
            facts(node).op = _op(graph_module, node, moving) if node in moving else None
        ops = list(ops_of(graph_module.graph))
        for node, op in ops:
            if node not in reached:
                op.input_gradient = op.weight_gradient = False
                facts(node).gradients_by = 0, 0
        name_ops(graph_module, ops)
        if not any(op.macs for _, op in ops):
            raise ModelError(
                "the model has no contraction whose cost is known, so there is nothing to quantize or to count: "
                f"fractrain_fx works on convolutions, linear layers and matrix products{_why_none(graph_module, ops)}"
            )
        return PassResult(graph_module, True)


def _why_none(graph_module: GraphModule, ops: Sequence[tuple[Node, Op]]) -> str:
    """What hides the contractions of a model, as a sentence that follows another."""
    if inside := ", ".join(repr(op.name) for _, op in ops if op.macs is None):
        return f". Its products lie inside calls that a graph cannot see into: {inside}"
    if not any(facts(node).tensors for node in graph_module.graph.find_nodes(op="placeholder")):
        return (
            ". No argument of the call holds tensors where a graph can see them: pass tensors, or lists, tuples, "
            "mappings or dataclasses of them"
        )
    return ""


def _op(graph_module: GraphModule, node: Node, moving: set[Node]) -> Op | None:
    """The op of a node, named as others may be too; ``None`` if the node multiplies nothing."""
    family, layout = contraction(node), _layout(node)
    if family is None or facts(node).shape is None or layout:
        return _whole(graph_module, node)
    first, second = (operand(node, place) for place in family.operands)
    a, b, out = facts(first), facts(second), facts(node)
    if a.shape is None or b.shape is None or out.shape is None:
        return None
    macs = macs_of(graph_module, node)
    assert macs is not None
    out.gradients_by, out.formula = (a.trained_by, b.trained_by), family.macs
    return Op(
        name=_name(node, family, second, moving),
        kind=family.kind,
        module=module_path(node),
        macs=macs,
        product=product_of(node, family, macs, shared=second not in moving),
        depthwise=family.kind == "conv" and b.shape[1] == 1 and b.shape[0] >= a.shape[1] > 1,
        input_gradient=a.requires_grad,
        weight_gradient=b.requires_grad,
    )


def macs_of(graph_module: GraphModule, node: Node) -> int | None:
    """Forward MACs for one sample of a contraction, from the shapes in the records of its node and of what it reads.

    ``None`` if no formula counts it.
    """
    samples, factors, owner = facts(node).samples or 1, factors_of(node), owner_module(graph_module, node)
    if factors is not None and facts(node).shape is not None and not _layout(node):
        (a, b), family = (facts(factor).shape for factor in factors), contraction(node)
        formula = family.macs if family else facts(node).formula
        return None if a is None or b is None or formula is None else formula(a, b, facts(node).shape or ()) // samples
    if owner is None:
        counted = unsplit(node)
        return None if counted is None else counted[1] // samples
    owner = owner.leaf if isinstance(owner, QuantizedLeaf) else owner
    read = [facts(source) for source in node.all_input_nodes if facts(source).shape is not None]
    if isinstance(owner, nn.RNNBase | nn.RNNCellBase) and read:
        return recurrent_macs(owner, read[0].shape or ()) // (read[0].samples or 1)
    return None


def _layout(node: Node) -> str | None:
    """``nested`` or ``sparse`` if an operand is, so that its numbers are not rounded."""
    return next((layout for source in node.all_input_nodes if (layout := facts(source).layout)), None)


def _whole(graph_module: GraphModule, node: Node) -> Op | None:
    """The op of a module kept as one node that multiplies inside, or of a function without two factors to quantize."""
    owner = owner_module(graph_module, node)
    counted = unsplit(node) if owner is None else None
    kind = counted[0] if counted is not None else uncounted_kind(node, owner)
    name = ""
    if kind is None and HIDDEN in node.meta:
        name = node.meta[HIDDEN].name
        kind = "function" if name else "module"
    if kind is None:
        return None
    layout = _layout(node)
    kind = kind if layout is None or layout in kind else f"{layout} {kind}"
    path = "" if isinstance(owner, Method) else module_path(node)
    label = path if owner is not None and not name else f"{path}.{name or kind}".lstrip(".")
    op = Op(label, kind, path, macs_of(graph_module, node))
    read = [facts(source) for source in node.all_input_nodes if facts(source).shape is not None]
    if counted is not None:
        op.input_gradient = read[0].requires_grad
        op.weight_gradient = any(record.requires_grad for record in read[1:])
        facts(node).gradients_by = read[0].trained_by, reduce(or_, (record.trained_by for record in read[1:]), 0)
    elif isinstance(owner, nn.RNNBase | nn.RNNCellBase) and read:
        op.input_gradient = read[0].requires_grad
        op.weight_gradient = any(parameter.requires_grad for parameter in owner.parameters())
        facts(node).gradients_by = read[0].trained_by, bits_of(graph_module, owner)
    return op


def _name(node: Node, family: Contraction, second: Node, moving: set[Node]) -> str:
    """The path of the weight's owner if there is a weight, else the path of the issuing module and the kind of op."""
    if second not in moving:
        weight = _parameter(second)
        if weight is not None:
            # torch's parametrizations keep the tensors that a weight is computed from one level deeper.
            weight = weight.partition(".parametrizations.")[0]
            owner, _, attribute = weight.rpartition(".")
            return owner if attribute == "weight" and owner else weight
    path = module_path(node)
    return f"{path}.{family.kind}" if path else family.kind


def _parameter(node: Node) -> str | None:
    """The parameter that a weight-like value is computed from: the first with at least two dimensions."""
    visited, queue = {node}, [node]
    while queue:
        current = queue.pop(0)
        value = _attribute(current)
        if isinstance(value, nn.Parameter) and value.ndim >= 2:
            return str(current.target)
        fresh = [source for source in current.all_input_nodes if source not in visited]
        visited.update(fresh)
        queue.extend(fresh)
    return None


def _attribute(node: Node) -> object:
    if node.op != "get_attr" or node.graph.owning_module is None:
        return None
    return attrgetter(str(node.target))(node.graph.owning_module)


def _reached_by_gradient(graph: Graph) -> set[Node]:
    """The nodes whose value would receive a gradient of the output if every parameter were trained.

    A node that writes into memory which others read counts as reached. The graph needs the annotations of ``Shapes``.
    """
    reached: set[Node] = set()
    later: set[Node] = set()
    for node in reversed(graph.nodes):
        writes = any(_is_read_elsewhere(operand, later) for operand in written(node))
        read = any(user in reached for user in node.users)
        if node.op == "output" or writes or (read and _passes(node)):
            reached.add(node)
        later.add(node)
    return reached


def _is_read_elsewhere(operand: Node, later: set[Node]) -> bool:
    """Whether nodes may read what was written to an operand otherwise than from the node that writes."""
    return bool(shares_memory(operand)) or any(user in later for user in operand.users)


def _passes(node: Node) -> bool:
    """Whether a gradient passes through a node: also through objects that may hold tensors, but not through sizes."""
    if facts(node).tensors:
        return facts(node).flows
    return node.op != "call_method" and not (
        node.target is getattr and facts(node.all_input_nodes[0]).shape is not None
    )
