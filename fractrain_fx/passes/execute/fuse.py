"""Make one op of each quantize / contract / quantize group, for the copy of the graph that runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fractrain_fx.config import CODE_BITS, Saved
from fractrain_fx.errors import PassError
from fractrain_fx.execution.fused_op import FusedOp
from fractrain_fx.execution.simulated.arithmetic import (
    AddMatMul,
    Arithmetic,
    Bound,
    Convolution,
    Einsum,
    Linear,
    MatMul,
)
from fractrain_fx.nn.quantizers import ActivationQuantizer, GradientQuantizer, WeightQuantizer, picked
from fractrain_fx.passes.graph.contractions import contraction, function_name, operand
from fractrain_fx.passes.graph.edit import NAMESPACE, call, insert_module
from fractrain_fx.passes.graph.facts import facts

__all__ = ["Fuse", "unfused"]


class Fuse(PassBase):
    """Replace each quantized contraction and the quantize nodes around it by one :class:`FusedOp`.

    The range of an activation stays a node, as ops that share an activation measure it once. A group that has no fused
    form (:func:`unfused` says why) stays as it is.

    Requires: a graph that the quantize pass has been over. Ensures: the numbers are the same; no fused op is left with
    a quantize node beside it.

    Args:
        saved: what fused ops keep of activations: ``operands``, ``rounded`` or ``codes`` (``FracConfig.saved``). An op
            pinned to more bits than a code has keeps its operands.
    """

    def __init__(self, saved: Saved = "operands") -> None:
        super().__init__()
        self._saved = saved

    def call(self, graph_module: GraphModule) -> PassResult:
        groups = [node for node in graph_module.graph.nodes if _group(node) is not None]
        kept = _kept(groups)
        shared = _Shared(graph_module)
        for node in groups:
            if node not in kept:
                _fuse(graph_module, node, shared, self._saved)
        graph_module.graph.lint()
        graph_module.recompile()
        return PassResult(graph_module, len(kept) < len(groups))

    def ensures(self, graph_module: GraphModule) -> None:
        for node in graph_module.graph.nodes:
            if facts(node).role in ("input", "weight", "gradient") and not node.users:
                raise PassError(f"the quantize node {node.name!r} serves nothing any more but still runs")


def unfused(graph_module: GraphModule) -> dict[str, str]:
    """Quantized ops of a graph that have no fused form, by name, with the reason."""
    groups = [node for node in graph_module.graph.nodes if _group(node) is not None]
    return {facts(node).op.name: reason for node, reason in _kept(groups).items()}  # type: ignore[union-attr]


def _group(node: Node) -> tuple[list[Node], Node] | None:
    """The quantize nodes of a contraction's factors and of its gradient, where it has them."""
    family = contraction(node)
    if family is None or facts(node).op is None:
        return None
    factors = [operand(node, place) for place in family.operands]
    after = [user for user in node.users if facts(user).role == "gradient"]
    if len(after) != 1 or len(node.users) != 1 or any(facts(f).role not in ("input", "weight") for f in factors):
        return None
    return factors, after[0]


def _kept(groups: list[Node]) -> dict[Node, str]:
    """Groups that must stay, with the reason. An activation that one of them reads is rounded once, for all."""
    kept = {node: arithmetic for node in groups if isinstance(arithmetic := arithmetic_of(node), str)}
    fusible = set(groups) - kept.keys()
    changed = True
    while changed:
        changed = False
        for node in sorted(fusible):
            factors, _ = _group(node) or ([], None)
            shared = [f for f in factors if facts(f).role == "input" and not fusible.issuperset(f.users)]
            if shared:
                fusible.remove(node)
                kept[node] = f"shares a rounded activation with {next(iter(shared[0].users)).name}, which is not fused"
                changed = True
    return kept


def arithmetic_of(node: Node) -> Arithmetic | str:
    """How to compute and differentiate a contraction, or why that is not known here."""
    found = _family(node)
    if not isinstance(found, str) and any(isinstance(each, Node) for each in _flat(found.bind(node.args, node.kwargs))):
        return "one of its arguments is computed as it runs"
    return found


def _flat(bound: Bound) -> Iterator[Any]:
    for each in bound.static:
        yield from each if isinstance(each, tuple) else (each,)


def _family(node: Node) -> Arithmetic | str:
    name = function_name(node)
    family = contraction(node)
    if family is None:
        return "is no contraction"
    shapes = [facts(operand(node, place)).shape or () for place in family.operands]
    if name.startswith("conv"):
        return _convolution(node, name, shapes)
    if name == "linear":
        return Linear() if len(shapes[1]) == 2 else "multiplies by a vector"
    if name == "einsum":
        return _einsum(node)
    if min(map(len, shapes)) < 2:
        return "multiplies by a vector"
    known: dict[str, Callable[[], Arithmetic]] = {
        "matmul": MatMul,
        "__matmul__": MatMul,
        "__rmatmul__": lambda: MatMul(swapped=True),
        "bmm": lambda: MatMul(("input", "mat2")),
        "mm": lambda: MatMul(("input", "mat2")),
        "addmm": lambda: AddMatMul(("input", "mat1", "mat2")),
        "baddbmm": lambda: AddMatMul(("input", "batch1", "batch2")),
    }
    return known[name]() if name in known else f"no fused form of {name} is known"


def _convolution(node: Node, name: str, shapes: list[tuple[int, ...]]) -> Arithmetic | str:
    dims = int(name[-2])
    if len(shapes[0]) != dims + 2:
        return "its input has no batch dimension"
    if operand(node, (4, "padding")) == "same" and any(kernel % 2 == 0 for kernel in shapes[1][2:]):
        return "pads its two sides differently"
    return Convolution(shapes[1][2:], "transpose" in name)


def _einsum(node: Node) -> Arithmetic | str:
    equation = str(node.args[0]).replace(" ", "")
    factors, arrow, out = equation.partition("->")
    first, second = factors.split(",")
    if not arrow or "." in equation:
        return "its equation leaves dimensions open"
    if any(len(set(term)) < len(term) for term in (first, second, out)):
        return "takes a diagonal"
    if set(first) - set(second + out) or set(second) - set(first + out):
        return "sums an index of one factor alone"
    return Einsum(equation)


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
        """What each sample has picked."""
        if choice not in self._picked:
            with self._graph.inserting_after(choice):
                self._picked[choice] = self._graph.call_function(picked, (choice,))
            facts(self._picked[choice]).role, facts(self._picked[choice]).owner = "bits", facts(choice).owner
        return self._picked[choice]


def _fuse(graph_module: GraphModule, node: Node, shared: _Shared, saved: Saved) -> None:
    graph = graph_module.graph
    group, arithmetic, op = _group(node), arithmetic_of(node), facts(node).op
    assert group is not None and op is not None and not isinstance(arithmetic, str)
    factors, gradient = group
    modules: list[Any] = [graph_module.get_submodule(str(each.target)) for each in (*factors, gradient)]
    quantizers = _typed(modules)
    ends = [shared.range(each, op.name) if facts(each).role == "input" else None for each in factors]
    path = f"fused.{str(gradient.target).split('.')[-2]}"
    bound = arithmetic.bind(node.args, node.kwargs)
    if saved == "codes" and op.precision.precision is not None and op.precision.precision.fw > CODE_BITS:
        saved = "operands"
    insert_module(graph_module, path, lambda: FusedOp(arithmetic, bound.static, *quantizers, saved))
    given = [each.args[1] for each in (*factors, gradient)]
    choice = next((each for each in given if isinstance(each, Node) and facts(each).role == "choice"), None)
    controls = tuple(shared.picked(each) if choice is not None and each is choice else each for each in given)
    arguments = [controls, choice, tuple(ends), gradient.args[2], bound.a.args[0], bound.b.args[0], bound.added]
    with graph.inserting_before(node):
        fused = call(graph, path, arguments, role="fused", owner=op.name, like=node)
    facts(fused).op = op
    gradient.replace_all_uses_with(fused)
    for spent in (gradient, node, *factors):
        if not spent.users and not spent._erased:
            graph.erase_node(spent)


def _typed(
    modules: list[nn.Module],
) -> tuple[ActivationQuantizer | WeightQuantizer, ActivationQuantizer | WeightQuantizer, GradientQuantizer]:
    first, second, gradient = modules
    if not (
        isinstance(first, ActivationQuantizer | WeightQuantizer)
        and isinstance(second, ActivationQuantizer | WeightQuantizer)
        and isinstance(gradient, GradientQuantizer)
    ):
        raise PassError("the nodes around a contraction are no quantizers of the quantize pass")
    return first, second, gradient
