"""Quantized ops that stay simulated although int8 or torchao was asked for, and the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.fx import GraphModule, Node

from fractrain_fx.execution.arithmetic import Arithmetic
from fractrain_fx.execution.fused_op import FusedOp
from fractrain_fx.nn.quantizers import WeightQuantizer
from fractrain_fx.passes.execute.fuse import unfused
from fractrain_fx.passes.graph.arithmetic import arithmetic_of
from fractrain_fx.passes.graph.contractions import OPAQUE_KINDS, factors_of
from fractrain_fx.passes.graph.edit import owner_module, varying
from fractrain_fx.passes.graph.facts import Op, facts, ops_of

__all__ = ["Reason", "WeightProduct", "left_out"]


class WeightProduct(NamedTuple):
    """A quantized op that multiplies an activation by a weight, whose sizes are ``shape``.

    ``static`` has the arguments that are not tensors; ``quantizer`` is ``None`` before the pass ``Quantize``.
    """

    op: Op
    arithmetic: Arithmetic
    static: tuple[Any, ...]
    shape: tuple[int, ...]
    quantizer: WeightQuantizer | None


Reason = Callable[[WeightProduct], str | None]
"""Gives the reason that a product stays simulated; ``None`` if it does not."""


def left_out(graph_module: GraphModule, reason: Reason) -> dict[str, str]:
    """By name, the quantized ops that are not a fused activation times a weight, or that ``reason`` rejects."""
    moving = varying(graph_module.graph)
    apart = unfused(graph_module)
    reasons: dict[str, str] = {}
    for node, op in ops_of(graph_module.graph):
        if op.precision.rounds:
            product = apart.get(op.name) or _product(graph_module, node, op, moving)
            why = product if isinstance(product, str) else reason(product)
            if why is not None:
                reasons[op.name] = why
    return reasons


def _product(graph_module: GraphModule, node: Node, op: Op, moving: set[Node]) -> WeightProduct | str:
    """The product of an op, or the reason that it is not one of an activation and a weight."""
    factors = factors_of(node)
    if op.kind in OPAQUE_KINDS or factors is None:
        return "is kept as one node"
    first, weight = factors
    if first not in moving:
        return "its first factor is the weight"
    if weight in moving:
        return "multiplies two activations"
    shape, fused = facts(weight).shape or (), owner_module(graph_module, node)
    if isinstance(fused, FusedOp):
        return WeightProduct(op, fused.plan.arithmetic, fused.plan.static, shape, fused.plan.second.quantizer)
    arithmetic, quantizer = arithmetic_of(node), owner_module(graph_module, weight)
    if isinstance(arithmetic, str):
        return arithmetic
    static = arithmetic.bind(node.args, node.kwargs).static
    return WeightProduct(op, arithmetic, static, shape, quantizer if isinstance(quantizer, WeightQuantizer) else None)
