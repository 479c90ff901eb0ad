"""Open up scaled dot-product attention into its two products, so that each can be quantized."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fractrain_fx.capture import ORDER
from fractrain_fx.capture.recording.regions import enter_attention
from fractrain_fx.nn.attention import attention_probabilities, in_order, repeat_heads
from fractrain_fx.passes.graph.contractions import function_name
from fractrain_fx.passes.graph.edit import nodes_until, origin, reached

__all__ = ["OpenAttention"]

_GIVES_USUAL_ORDER = frozenset({"reshape", "flatten", "contiguous", "linear", "matmul", "bmm", "mm", "addmm"})
_ATTENTION = "scaled_dot_product_attention"
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")


class OpenAttention(PassBase):
    """Replace each ``scaled_dot_product_attention`` by query @ key, masked softmax, @ value.

    The fused op gives its result in the order of its query in memory, which later code may rely on: a ``view`` joins
    dimensions that lie side by side. For such code the result of the second product is put in that order.

    Requires: nothing. Ensures: no such node is left, and nothing chooses its kernels; the numbers are those of torch's
    documented formula.
    """

    def call(self, graph_module: GraphModule) -> PassResult:
        attentions = [node for node in graph_module.graph.nodes if function_name(node) == _ATTENTION]
        for node in attentions:
            _open(node)
        for start in graph_module.graph.find_nodes(op="call_function", target=enter_attention):
            _drop_choice_of_kernels(start)
        return PassResult(graph_module, bool(attentions))


def _open(node: Node) -> None:
    arguments: dict[str, Any] = dict(zip(_ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)
    query, key, value = arguments.pop("query"), arguments.pop("key"), arguments.pop("value")
    grouped = arguments.pop("enable_gqa", False)
    graph = node.graph
    calls: list[Node] = []
    with graph.inserting_before(node):
        if grouped:
            key = graph.call_function(repeat_heads, (key, query))
            value = graph.call_function(repeat_heads, (value, query))
            calls += [key, value]
        transposed = graph.call_method("transpose", (key, -2, -1))
        scores = graph.call_function(torch.matmul, (query, transposed))
        probabilities = graph.call_function(attention_probabilities, (scores, query), arguments)
        output = graph.call_function(torch.matmul, (probabilities, value))
        calls += [transposed, scores, probabilities, output]
        if ORDER in node.meta and _is_viewed(node):
            output = graph.call_function(in_order, (output, node.meta[ORDER]))
            calls.append(output)
    for call in calls:
        call.meta = origin(node)
    node.replace_all_uses_with(output)
    graph.erase_node(node)


def _drop_choice_of_kernels(start: Node) -> None:
    """Erase a region in which kernels of attention are chosen, unless a module in it may call attention itself."""
    (stop,) = start.users
    if all(node.op != "call_module" for node in nodes_until(start, stop)):
        for edge in (stop, start):
            edge.graph.erase_node(edge)


def _is_viewed(node: Node) -> bool:
    """Whether a ``view`` reads the result of a node, or of calls that keep its order in memory."""
    nodes = reached([node], lambda x: [user for user in x.users if function_name(user) not in _GIVES_USUAL_ORDER])
    return any(function_name(user) in ("view", "view_as") for user in nodes)
