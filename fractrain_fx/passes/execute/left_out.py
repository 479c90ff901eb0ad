"""Quantized ops of a shown graph that stay simulated although int8 or torchao was asked for, and the reason."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import GraphModule, Node

from fractrain_fx.execution.arithmetic import Arithmetic
from fractrain_fx.execution.fused_op import FusedOp
from fractrain_fx.passes.execute.fuse import unfused
from fractrain_fx.passes.graph.arithmetic import arithmetic_of
from fractrain_fx.passes.graph.contractions import OPAQUE_KINDS, contraction, operand
from fractrain_fx.passes.graph.edit import varying
from fractrain_fx.passes.graph.facts import Op, ops_of

__all__ = ["Reason", "left_out"]

_ACTIVATIONS, _WEIGHT_FIRST = "multiplies two activations", "its first factor is the weight"

Reason = Callable[[Node, Op, Arithmetic, Node], str | None]
"""Takes a call, its op, arithmetic and weight; gives the reason that this product stays simulated, if it does."""


def left_out(graph_module: GraphModule, reason: Reason) -> dict[str, str]:
    """By name, the quantized ops that are not a fused activation times a weight, or that ``reason`` rejects."""
    moving = varying(graph_module.graph)
    apart = unfused(graph_module)
    found: dict[str, str] = {}
    for node, op in ops_of(graph_module.graph):
        if op.precision.rounds:
            fused = graph_module.get_submodule(str(node.target)) if node.op == "call_module" else None
            if isinstance(fused, FusedOp):  # the shown graph of a format that rounds for each product has fused ops
                why = _why_fused(node, op, fused, reason)
            else:
                why = apart.get(op.name) or _why(node, op, moving, reason)
            if why is not None:
                found[op.name] = why
    return found


def _why_fused(node: Node, op: Op, fused: FusedOp, reason: Reason) -> str | None:
    if fused.plan.first.weight:
        return _WEIGHT_FIRST
    second = node.kwargs["b"]
    if not fused.plan.second.weight or not isinstance(second, Node):
        return _ACTIVATIONS
    return reason(node, op, fused.plan.arithmetic, second)


def _why(node: Node, op: Op, moving: set[Node], reason: Reason) -> str | None:
    family = contraction(node)
    if op.kind in OPAQUE_KINDS or family is None:
        return "is kept as one node"
    first, second = (operand(node, place) for place in family.operands)
    if second in moving:
        return _ACTIVATIONS
    if first not in moving:
        return _WEIGHT_FIRST
    arithmetic = arithmetic_of(node)
    return arithmetic if isinstance(arithmetic, str) else reason(node, op, arithmetic, second)
