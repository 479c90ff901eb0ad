"""The quantized ops of a shown graph that stay simulated although another execution was asked for, and why."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import GraphModule, Node

from fractrain_fx.execution.simulated.arithmetic import Arithmetic
from fractrain_fx.passes.execute.fuse import unfused
from fractrain_fx.passes.graph.arithmetic import arithmetic_of
from fractrain_fx.passes.graph.contractions import OPAQUE_KINDS, contraction, operand
from fractrain_fx.passes.graph.edit import varying
from fractrain_fx.passes.graph.facts import Op, ops_of

__all__ = ["Reason", "left_out"]

Reason = Callable[[Node, Op, Arithmetic, Node], str | None]
"""From a call, its op, its arithmetic and its weight: why this activation times a weight has no other form."""


def left_out(graph_module: GraphModule, reason: Reason) -> dict[str, str]:
    """Quantized ops by name, each with why it stays simulated: not a fused activation times a weight, or ``reason``."""
    moving = varying(graph_module.graph)
    apart = unfused(graph_module)
    found: dict[str, str] = {}
    for node, op in ops_of(graph_module.graph):
        if op.precision.mode not in ("float", "uncounted"):
            why = apart.get(op.name) or _why(node, op, moving, reason)
            if why is not None:
                found[op.name] = why
    return found


def _why(node: Node, op: Op, moving: set[Node], reason: Reason) -> str | None:
    family = contraction(node)
    if op.kind in OPAQUE_KINDS or family is None:
        return "was recorded as a whole"
    first, second = (operand(node, place) for place in family.operands)
    if second in moving:
        return "multiplies two activations"
    if first not in moving:
        return "its first factor is the weight"
    arithmetic = arithmetic_of(node)
    return arithmetic if isinstance(arithmetic, str) else reason(node, op, arithmetic, second)
