"""Find the nodes that may share memory, and those that write to it.

A recording notes on each node what its call did (``capture/recording/memory.py``). Names say what else a call may do:
for other layouts, types and modes, and for nodes that a pass has put into the graph.
"""

from __future__ import annotations

from torch import nn
from torch.fx import Graph, Node

from fractrain_fx.capture import changes_operands, memory_in
from fractrain_fx.execution.blocks.dispatched_block import DispatchedBlock
from fractrain_fx.passes.graph.contractions import function_name
from fractrain_fx.passes.graph.edit import reached

__all__ = ["Writes", "base", "is_view", "memory_of", "shares_memory", "written"]

# Calls whose result may lie in the memory of their first operand.
_VIEWS = frozenset(
    {
        *("view", "view_as", "reshape", "flatten", "unflatten", "permute", "transpose", "t", "movedim", "swapaxes"),
        *("swapdims", "squeeze", "unsqueeze", "expand", "expand_as", "broadcast_to", "chunk", "split", "tensor_split"),
        *("split_with_sizes", "unbind", "getitem", "getattr", "narrow", "select", "diagonal", "contiguous", "detach"),
        *("alias", "to", "type", "type_as", "float", "half", "bfloat16", "double", "view_as_real", "view_as_complex"),
        *("ravel", "cpu", "cuda", "bool", "byte", "char", "short", "int", "long", "cfloat", "cdouble", "chalf"),
        *("resolve_conj", "resolve_neg", "conj_physical", "sum_to_size", "dequantize", "to_dense"),
    }
)


def is_view(node: Node) -> bool:
    """Whether a call by its name moves no values; some of these copy if the memory does not lie right."""
    return function_name(node) in _VIEWS


def base(node: Node) -> Node | None:
    """The first operand of a node, or its ``out``: an in-place op writes to it."""
    first = node.kwargs.get("out") or (node.args[0] if node.args else None)
    return first if isinstance(first, Node) else None


def written(node: Node) -> list[Node]:
    """The operands that a call may change."""
    recorded = memory_in(node).written(node)
    if recorded or not changes_operands(node):
        return recorded
    first = base(node)
    return node.all_input_nodes if first is None else [first]


def shares_memory(node: Node) -> list[Node]:
    """The operands in whose memory a node's value may lie."""
    operands = memory_in(node).shared(node)
    if (first := base(node)) is not None and (is_view(node) or changes_operands(node) or _passes_on(node)):
        operands.append(first)
    # ``x.data = y``
    return operands + [user.args[2] for user in node.users if user.target is setattr and isinstance(user.args[2], Node)]


def memory_of(node: Node) -> set[Node]:
    """A node, and all nodes in whose memory its value may lie. Two values may share memory if these sets overlap."""
    return reached([node], shares_memory)


class Writes:
    """The writes of a graph, as it is now, into memory that values may share."""

    def __init__(self, graph: Graph) -> None:
        changed = {node: written(node) for node in graph.nodes}
        self._changed = [(node, self._memory(operands)) for node, operands in changed.items() if operands]

    def last(self, value: Node, reader: Node) -> Node | None:
        """The last node before ``reader`` that may change the memory of a value."""
        memory = self._memory([value]) if self._changed else set()
        writers = (node for node, changed in reversed(self._changed) if not changed.isdisjoint(memory))
        return next((node for node in writers if node < reader), None)

    def _memory(self, values: list[Node]) -> set[object]:
        """The nodes whose memory values may share; parameters and buffers, which several nodes read, by their paths."""
        shared = {node for value in values for node in memory_of(value)}
        return {node.target if node.op == "get_attr" else node for node in shared}


def _passes_on(node: Node) -> bool:
    """Whether a node calls a module that may return its own input, as dropout does in evaluation."""
    owner = node.graph.owning_module
    if node.op != "call_module" or owner is None:
        return False
    module: nn.Module = owner.get_submodule(str(node.target))
    return not isinstance(module, DispatchedBlock) and not any(True for _ in module.parameters())
