"""Find the node whose memory a value of the graph may share."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.fx import GraphModule, Node

from fractrain_fx.capture import changes_operands
from fractrain_fx.execution.blocks.dispatched_block import DispatchedBlock
from fractrain_fx.passes.graph.contractions import function_name
from fractrain_fx.passes.graph.edit import owner_module

__all__ = ["base", "is_view", "memory_of"]

# Calls whose result may lie in the memory of their first operand.
_VIEWS = frozenset(
    {
        *("view", "view_as", "reshape", "flatten", "unflatten", "permute", "transpose", "t", "movedim", "swapaxes"),
        *("swapdims", "squeeze", "unsqueeze", "expand", "expand_as", "broadcast_to", "chunk", "split", "tensor_split"),
        *("split_with_sizes", "unbind", "getitem", "getattr", "narrow", "select", "diagonal", "contiguous", "detach"),
        *("alias", "to", "type", "type_as", "float", "half", "bfloat16", "double", "view_as_real", "view_as_complex"),
    }
)


def is_view(node: Node) -> bool:
    """Whether a call by its name moves no values; some of these copy if the memory does not lie right."""
    return function_name(node) in _VIEWS


def base(node: Node) -> Node | None:
    """The first operand of a node, or its ``out``: an in-place op writes to it."""
    first = node.kwargs.get("out") or (node.args[0] if node.args else None)
    return first if isinstance(first, Node) else None


def memory_of(node: Node | None, graph_module: GraphModule) -> Node | None:
    """The node whose memory a value may share."""
    for each in _aliases(node, graph_module):
        node = each
    return node


def _aliases(node: Node | None, graph_module: GraphModule) -> Iterator[Node]:
    while node is not None:
        yield node
        module = owner_module(graph_module, node)
        passes_on = module is not None and _passes_on(module)
        node = base(node) if passes_on or function_name(node) in _VIEWS or changes_operands(node) else None


def _passes_on(module: nn.Module) -> bool:
    """Whether a module may return its own input, as dropout does in evaluation."""
    return not isinstance(module, DispatchedBlock) and not any(True for _ in module.parameters())
