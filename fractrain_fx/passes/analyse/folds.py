"""Find each sample's rows in a dimension into which windows or heads are folded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from fractrain_fx.capture.state import seeded
from fractrain_fx.capture.trees import map_tensors
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.passes.graph.contractions import function_name
from fractrain_fx.passes.graph.facts import facts
from fractrain_fx.passes.graph.run import ValueViewer

__all__ = ["Fold", "folds_by_change", "folds_by_origin"]

Fold = tuple[int, int]
"""A dimension, and the number of its rows that belong to one sample."""

_ROUNDING = 1e-5  # relative to the largest value
_SHARED = 255  # in a tensor of sample numbers: the element belongs to no single sample
# Calls that only move, repeat or pick values: run on sample numbers, they give the sample of each value.
_MOVES = frozenset(
    {
        *("view", "reshape", "flatten", "unflatten", "permute", "transpose", "t", "movedim", "swapaxes", "swapdims"),
        *("squeeze", "unsqueeze", "expand", "expand_as", "repeat", "repeat_interleave", "tile", "cat", "concat"),
        *("stack", "chunk", "split", "split_with_sizes", "tensor_split", "unbind", "getitem", "roll", "flip", "rot90"),
        *("contiguous", "clone", "detach", "alias", "unfold", "narrow", "select", "index_select", "diagonal", "pad"),
    }
)


def folds_by_change(
    graph_module: GraphModule,
    batch: list[Any],
    size: int,
    batch_axis: int,
    folded: Mapping[Node, Fold],
    *,
    packed: bool = False,
) -> dict[Node, BatchAxis | None]:
    """Change one sample and see which rows change: gives the batch axis of each node in ``folded``.

    It is ``None`` if the rows of a node's samples are in another order. ``graph_module`` is in evaluation mode,
    ``batch`` are its inputs with ``size`` samples along ``batch_axis``; ``packed``: a sample may have several rows of
    an input.
    """
    with torch.no_grad():
        before = _values(graph_module, batch, folded)
        try:
            after = _values(graph_module, _perturb_first(batch, size, batch_axis, packed, torch.roll), folded)
        except (RuntimeError, ValueError, IndexError):
            after = _values(graph_module, _perturb_first(batch, size, batch_axis, packed, _lowered), folded)
    return {node: _compare(before[node], after[node], *fold, size) for node, fold in folded.items()}


def folds_by_origin(
    graph_module: GraphModule, batch: list[Any], size: int, folded: Mapping[Node, Fold]
) -> dict[Node, BatchAxis | None]:
    """The same for tensors without data: follow each sample's number through the calls that move values.

    Every other call is assumed to keep the order of the rows in a folded dimension.
    """
    axes: dict[Node, BatchAxis | None] = {}
    origins: dict[Node, Any] = {}

    class Follow(ValueViewer):
        def run_node(self, n: Node) -> Any:
            origin = _moved(self, n, origins) if _moves(n, origins) else None
            value = super().run_node(n)
            if not _moves(n, origins):
                origin = _kept(n, value, folded, axes, size)
            if origin is not None:
                origins[n] = origin
            if n in folded:
                axes[n] = _layout(origin, *folded[n], size) if isinstance(origin, Tensor) else None
            for used in self.user_to_last_uses.get(n, ()):
                origins.pop(used, None)
            return value

    with torch.no_grad():
        Follow(graph_module, lambda node, value: None).run(*batch)
    return axes


def _moves(node: Node, origins: Mapping[Node, Any]) -> bool:
    """Whether a node moves values of known samples to places that do not depend on the values of other tensors."""
    name = function_name(node)
    if name in ("getitem", "index_select"):
        return node.args[0] in origins and not any(facts(source).tensors for source in node.all_input_nodes[1:])
    return name in _MOVES and any(source in origins for source in node.all_input_nodes)


def _moved(run: ValueViewer, node: Node, origins: Mapping[Node, Any]) -> Any:
    """The result of a node's call on sample numbers instead of values."""
    flat, spec = tree_flatten((node.args, node.kwargs), is_leaf=lambda x: isinstance(x, Node))
    values: Any = run.map_nodes_to_values(tuple(flat), node)
    numbers = [
        origins[x] if isinstance(x, Node) and x in origins else tree_map(_unowned, value)
        for x, value in zip(flat, values, strict=True)
    ]
    args, kwargs = tree_unflatten(numbers, spec)
    name = function_name(node)
    if name == "pad":
        return torch.nn.functional.pad(args[0], args[1], value=_SHARED) if len(args) < 3 else None
    if node.op == "call_method":
        # Sample numbers have other strides than the values, so a view of the values may need a copy of the numbers.
        return getattr(args[0], "reshape" if name == "view" else name)(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _unowned(value: Any) -> Any:
    """Sample numbers for a value that belongs to no single sample."""
    if isinstance(value, Tensor) and value.is_meta:
        return torch.full((1,) * value.ndim, _SHARED, dtype=torch.uint8).expand(value.shape)
    return value


def _kept(
    node: Node, value: Any, folded: Mapping[Node, Fold], axes: Mapping[Node, BatchAxis | None], size: int
) -> Tensor | None:
    """Sample numbers of a tensor whose rows are in the same order as in the tensors that it was computed from."""
    if not isinstance(value, Tensor):
        return None
    batch = facts(node).batch
    if node in folded:
        axis, factor = folded[node]
        sources = {axes.get(source) for source in node.all_input_nodes if folded.get(source) == (axis, factor)}
        batch = sources.pop() if len(sources) == 1 else None
    if batch is None:
        return None
    rows = batch.expand(torch.arange(size, dtype=torch.uint8), value.shape)
    return rows.expand(value.shape)


def _layout(origin: Tensor, axis: int, factor: int, size: int) -> BatchAxis | None:
    rows = origin.movedim(axis, 0).reshape(origin.shape[axis], -1)
    first = rows.amin(dim=1, keepdim=True)
    if ((rows != first) & (rows != _SHARED)).any():
        return None
    numbers = torch.arange(size, dtype=torch.uint8)
    for major, expected in ((True, numbers.repeat_interleave(factor)), (False, numbers.repeat(factor))):
        if ((first[:, 0] == expected) | (first[:, 0] == _SHARED)).all():
            return BatchAxis(axis, factor, major)
    return None


def _compare(before: Tensor, after: Tensor, axis: int, factor: int, size: int) -> BatchAxis | None:
    same = (before == after) | ((before != before) & (after != after))
    place = _changed(~same, axis, factor, size)
    if place is None and before.is_floating_point():
        # An expert that now multiplies other rows together may round the rows of unchanged samples differently.
        largest = float(before.nan_to_num(0.0, 0.0, 0.0).abs().max())
        place = _changed(~(same | ((before - after).abs() <= _ROUNDING * largest)), axis, factor, size)
    return place


def _changed(differs: Tensor, axis: int, factor: int, size: int) -> BatchAxis | None:
    changed = differs.movedim(axis, 0).reshape(differs.shape[axis], -1).any(dim=1)
    if not changed.any():
        return BatchAxis(axis, factor)  # no value depends on the sample; the common layout is as good as the other
    first = torch.zeros_like(changed)
    first[:factor] = True
    if not (changed & ~first).any():
        return BatchAxis(axis, factor, major=True)
    if not (changed & (torch.arange(len(changed), device=changed.device) % size != 0)).any():
        return BatchAxis(axis, factor, major=False)
    return None


def _lowered(numbers: Tensor, shift: int, dims: int) -> Tensor:
    """Lower whole numbers that index tables of different sizes: moved to another column, they could be out of range."""
    return torch.minimum(numbers, numbers.roll(shift, dims))


def _perturb_first(
    batch: list[Any], size: int, batch_axis: int, packed: bool, change_numbers: Callable[[Tensor, int, int], Tensor]
) -> list[Any]:
    """The batch with a changed first sample.

    ``change_numbers`` changes whole numbers. Moving them keeps the count of each number, say of an image's tokens.
    """

    def change(value: Tensor) -> Tensor:
        if value.ndim <= max(batch_axis, 1) or value.shape[batch_axis] % size:
            return value
        rows = value.shape[batch_axis] // size
        # In a packed batch, whole numbers count the rows of each sample, so they stay.
        if not rows or (packed and not value.is_floating_point()) or (rows > 1 and not packed):
            return value
        value = value.clone()
        sample = value.narrow(batch_axis, 0, rows)
        whole = not (value.is_floating_point() or value.is_complex())
        sample.copy_(change_numbers(sample.clone(), 1, -1) if whole else sample.roll(1, dims=-1) * 0.9)
        return value

    return list(map_tensors(batch, change))


def _values(graph_module: GraphModule, inputs: list[Any], wanted: Collection[Node]) -> dict[Node, Tensor]:
    values: dict[Node, Tensor] = {}

    def keep(node: Node, value: Any) -> None:
        if node in wanted:
            values[node] = value.clone()

    with seeded():  # so that random draws do not differ between the two runs
        ValueViewer(graph_module, keep).run(*inputs)
    return values
