"""The work of a recorded model beside its contractions, as values that move: norms, activations, sums, losses."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import nn
from torch.fx import GraphModule, Node

from fractrain_fx.hardware.machine import Traffic
from fractrain_fx.passes import facts
from fractrain_fx.passes.graph.aliases import is_view
from fractrain_fx.passes.graph.contractions import function_name
from fractrain_fx.passes.graph.edit import owner_module

__all__ = ["traffic_of"]

# How often a call moves its input and its output, forward and backward. Statistics of a batch are a pass over the input
# of their own, forward and backward. The gradient of a sum passes on unchanged, but where the paths meet again it is
# added up: two values read, one written.
_OTHERS = (3.0, 2.0)  # forward x, y; backward x, grad y, grad x
_BATCH_NORM = (5.0, 3.0)  # forward x twice, y; backward x and grad y twice, grad x
_SUM = (1.0, 1.0)  # for each operand, forward; its gradients are added up
_SUMS = frozenset({"add", "__add__", "iadd", "__iadd__", "add_", "sub", "__sub__"})


def traffic_of(graph_module: GraphModule) -> list[Traffic]:
    """Every call of a model on activations that is not a contraction, without what a rewriting inserted.

    Calls on weights are left out.
    """
    return [Traffic(node.name, values) for node, values in _moved(graph_module) if values]


def _moved(graph_module: GraphModule) -> Iterator[tuple[Node, float]]:
    for node in graph_module.graph.nodes:
        record = facts(node)
        if node.op not in ("call_function", "call_method", "call_module") or record.op is not None or record.role:
            continue
        if _values(node) is None or not record.flows or is_view(node) or _does_nothing(node, graph_module):
            continue
        out = _values(node) or 0.0
        inputs = [count for x in node.all_input_nodes if (count := _values(x)) is not None and facts(x).flows]
        of_input, of_output = _passes(node, graph_module)
        gradients = 3 * out if function_name(node) in _SUMS and len(inputs) > 1 else 0.0
        yield node, of_input * sum(inputs) + of_output * out + gradients


def _does_nothing(node: Node, graph_module: GraphModule) -> bool:
    module = owner_module(graph_module, node)
    return isinstance(module, nn.Identity) or (isinstance(module, nn.Dropout) and module.p == 0)


def _passes(node: Node, graph_module: GraphModule) -> tuple[float, float]:
    if function_name(node) in _SUMS:
        return _SUM
    module = owner_module(graph_module, node)
    normalises = isinstance(module, nn.modules.batchnorm._BatchNorm) or function_name(node) == "batch_norm"
    return _BATCH_NORM if normalises else _OTHERS


def _values(node: Node) -> float | None:
    """Values of one sample; ``None`` for what is not a tensor of floats."""
    record = facts(node)
    if record.shape is None or record.dtype is None or not record.dtype.is_floating_point:
        return None
    return math.prod(record.shape) / (record.samples or 1)
