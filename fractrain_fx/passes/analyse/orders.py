"""Follow calls that put the samples of a batch into another order, as ``x[order]`` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Graph, Node

from fractrain_fx.passes.graph.contractions import function_name, operand
from fractrain_fx.passes.graph.facts import facts

__all__ = ["sample_orders"]

# The place and the name of the argument that says along which dimension a call moves values.
_MOVERS = {
    "index_select": (1, "dim"),
    "gather": (1, "dim"),
    "take_along_dim": (2, "dim"),
    "sort": (1, "dim"),
    "roll": (2, "dims"),
    "flip": (1, "dims"),
}
_MOVED = (0, "input")


def sample_orders(graph: Graph) -> dict[Node, frozenset[Node]]:
    """The reordering calls behind each value: two values with the same ones have their samples in the same order.

    A call counts if it moves values along the dimension of the samples. ``x[torch.arange(n), last]`` reads from the row
    of each sample in turn, and does not count. ``x[order][order.argsort()]`` is in the order of ``x`` again.
    """
    orders: dict[Node, frozenset[Node]] = {}
    counted: set[Node] = set()  # tensors that sizes alone decide, such as arange(n)
    movers: dict[Node, Node] = {}  # by what they index with
    for node in graph.nodes:
        tensors = [source for source in node.all_input_nodes if facts(source).tensors]
        if function_name(node) == "arange" or (tensors and all(source in counted for source in tensors)):
            counted.add(node)
        orders[node] = frozenset[Node]().union(*(orders[source] for source in node.all_input_nodes))
        index = _moved_by(node, counted)
        if index is None:
            continue
        undone = movers.get(_ordered(index)) if isinstance(index, Node) else None
        if undone is not None and orders[undone] == orders[operand(node, _MOVED)]:
            orders[node] = orders[operand(undone, _MOVED)]
            continue
        orders[node] |= {node}
        if isinstance(index, Node):
            movers[index] = node
    return orders


def _ordered(index: Node) -> Any:
    """The tensor whose ascending order an index is."""
    if function_name(index) == "getitem" and index.args[1] == 1:
        sort = index.args[0]
        return (
            sort.args[0] if isinstance(sort, Node) and function_name(sort) == "sort" and len(sort.args) == 1 else None
        )
    return index.args[0] if function_name(index) == "argsort" and len(index.args) == 1 else None


def _moved_by(node: Node, counted: set[Node]) -> Any:
    """What a call moves the rows of samples by, an index or dimensions; ``None`` if it leaves them in place."""
    moved = operand(node, _MOVED)
    if not isinstance(moved, Node) or (batch := facts(moved).batch) is None or batch.whole:
        return None
    ndim, name = len(facts(moved).shape or ()), function_name(node)
    if name == "getitem":
        index = _index_along(node.args[1], batch.axis, ndim)
        return index if isinstance(index, Node) and facts(index).tensors and index not in counted else None
    if name not in _MOVERS:
        return None
    along = node.args[1:] if name == "flip" and len(node.args) > 2 else operand(node, _MOVERS[name])
    if along is None:  # torch's default: the last dimension of sort; roll then moves the values of all dimensions
        along = ndim - 1 if name == "sort" else batch.axis
    dims = along if isinstance(along, Sequence) else (along,)
    if not any(isinstance(dim, int) and dim % ndim == batch.axis for dim in dims):
        return None
    return operand(node, (2, "index")) if name == "index_select" else along


def _index_along(index: Any, axis: int, ndim: int) -> Any:
    """What a subscript says of one dimension; ``None`` if it takes all of it."""
    dims = [item for item in (index if isinstance(index, tuple) else (index,)) if item is not None]
    if any(item is Ellipsis for item in dims):
        place = next(place for place, item in enumerate(dims) if item is Ellipsis)
        dims[place : place + 1] = [None] * (ndim - len(dims) + 1)
    return dims[axis] if axis < len(dims) else None
