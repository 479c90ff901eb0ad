"""Run the graph to learn every tensor's shape, dtype and gradient, and where its samples lie."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult
from torch.utils._pytree import tree_leaves, tree_map

from fractrain_fx.capture import batch_size, resize_batch
from fractrain_fx.errors import PassError
from fractrain_fx.nn.axis import BatchAxis
from fractrain_fx.passes.facts import facts

__all__ = ["Shapes"]

_EXAMPLE = "example"
_ROUNDING = 1e-5  # of the largest value


class Shapes(PassBase):
    """Annotate each node with shape, dtype, whether autograd reaches it, and its batch axis.

    The batch axis is the one dimension that grows in proportion when the batch does. Where several rows belong to a
    sample (windows or heads folded into the batch), one sample is changed to see which rows are its own.

    Requires: ``node.meta["example"]`` on every placeholder. Ensures: a record on every node whose value is a tensor.
    """

    def __init__(self, batch_axis: int = 0) -> None:
        super().__init__()
        self.batch_axis = batch_axis

    def requires(self, graph_module: GraphModule) -> None:
        for node in graph_module.graph.find_nodes(op="placeholder"):
            if _EXAMPLE not in node.meta:
                raise PassError(f"input {node.name!r} has no example value in node.meta['example'] to run with")

    def call(self, graph_module: GraphModule) -> PassResult:
        examples = [node.meta[_EXAMPLE] for node in graph_module.graph.find_nodes(op="placeholder")]
        with _evaluating(graph_module), torch.enable_grad():
            self._measure(graph_module, examples)
        _propagate_gradients(graph_module)
        return PassResult(graph_module, True)

    def _measure(self, graph_module: GraphModule, examples: list[Any]) -> None:
        given = batch_size(examples, self.batch_axis)
        if given is None:
            _Watch(graph_module, _annotate).run(*_tracked(examples))
            return
        size = max(given, 2)
        batch = resize_batch(examples, size, self.batch_axis)
        _Watch(graph_module, _annotate).run(*_tracked(batch))
        grown: dict[Node, tuple[int, ...]] = {}

        def measure(node: Node, value: Any) -> None:
            if isinstance(value, Tensor):
                grown[node] = tuple(value.shape)

        try:
            with torch.no_grad():
                _Watch(graph_module, measure).run(*resize_batch(examples, size + 1, self.batch_axis))
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
            # The graph holds one batch size only (capture has said so): no axis is known, nothing is per sample.
            return
        folded: dict[Node, tuple[int, int]] = {}
        for node, other in grown.items():
            place = _growing(facts(node).shape or (), other, size)
            facts(node).samples = size if place is not None else None
            if place is not None and place[1] == 1:
                facts(node).batch = BatchAxis(place[0])
            elif place is not None:
                folded[node] = place
        if folded:
            with torch.no_grad():
                before = _values(graph_module, batch, folded)
                after = _values(graph_module, _perturb_first(batch, size, self.batch_axis), folded)
            for node, (axis, factor) in folded.items():
                facts(node).batch = _fold(before[node], after[node], axis, factor, size)

    def ensures(self, graph_module: GraphModule) -> None:
        if not any(facts(node).shape is not None for node in graph_module.graph.nodes):
            raise PassError("no node of the graph gives a tensor; was it recorded with example inputs?")


def _fold(before: Tensor, after: Tensor, axis: int, factor: int, size: int) -> BatchAxis | None:
    same = (before == after) | ((before != before) & (after != after))
    place = _layout(~same, axis, factor, size)
    if place is None and before.is_floating_point():
        # Rows of other samples are rounded differently where rows are multiplied in other groups (experts).
        largest = float(before.nan_to_num(0.0, 0.0, 0.0).abs().max())
        place = _layout(~(same | ((before - after).abs() <= _ROUNDING * largest)), axis, factor, size)
    return place


def _layout(differs: Tensor, axis: int, factor: int, size: int) -> BatchAxis | None:
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


def _growing(shape: Sequence[int], grown: Sequence[int], size: int) -> tuple[int, int] | None:
    """The one dimension that is ``factor`` times the batch size in both runs (at ``size`` and ``size + 1``)."""
    if len(grown) != len(shape):
        return None
    changed = [axis for axis in range(len(shape)) if shape[axis] != grown[axis]]
    if len(changed) != 1:
        return None
    axis = changed[0]
    factor, rest = divmod(shape[axis], size)
    return (axis, factor) if not rest and factor and grown[axis] == factor * (size + 1) else None


def _perturb_first(batch: list[Any], size: int, batch_axis: int) -> list[Any]:
    def change(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim <= max(batch_axis, 1) or value.shape[batch_axis] != size:
            return value
        value = value.clone()
        sample = value.select(batch_axis, 0)
        sample.copy_(sample.roll(1, dims=-1).clone())
        if value.is_floating_point():
            sample.mul_(0.9)
        return value

    return list(tree_map(change, batch))


class _Watch(Interpreter):
    """Run a graph and show each value to ``see`` the moment it is made (later nodes may change it in place)."""

    def __init__(self, graph_module: GraphModule, see: Callable[[Node, Any], None]) -> None:
        super().__init__(graph_module)
        self._see = see

    def run_node(self, n: Node) -> Any:
        # All that floats is tracked here already, and torch refuses to switch on what another op made.
        if n.target is setattr and n.args[1] == "requires_grad":
            return None
        value = super().run_node(n)
        self._see(n, value)
        return value


def _annotate(node: Node, value: Any) -> None:
    record = facts(node)
    record.batch = record.samples = None
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    record.tensors, record.flows = bool(tensors), any(tensor.requires_grad for tensor in tensors)
    if isinstance(value, Tensor):
        record.shape, record.dtype = tuple(value.shape), value.dtype


def _tracked(inputs: list[Any]) -> list[Any]:
    """Inputs that autograd follows, and that an in-place op may change."""

    def track(value: Any) -> Any:
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            return value.detach().requires_grad_().clone()
        return value

    return list(tree_map(track, inputs))


def _propagate_gradients(graph_module: GraphModule) -> None:
    """Which nodes need a gradient in training, from the parameters that are trained."""
    for node in graph_module.graph.nodes:
        record = facts(node)
        if node.op == "placeholder":
            trained = any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(node.meta[_EXAMPLE]))
        elif node.op == "get_attr":
            owner, _, name = str(node.target).rpartition(".")
            trained = getattr(getattr(graph_module.get_submodule(owner), name), "requires_grad", False)
        else:
            trained = any(facts(source).requires_grad for source in node.all_input_nodes)
        if node.op == "call_module":
            module = graph_module.get_submodule(str(node.target))
            trained = trained or any(parameter.requires_grad for parameter in module.parameters())
        record.requires_grad = record.flows and trained


def _values(graph_module: GraphModule, inputs: list[Any], wanted: Collection[Node]) -> dict[Node, Tensor]:
    values: dict[Node, Tensor] = {}

    def keep(node: Node, value: Any) -> None:
        if node in wanted:
            values[node] = value.clone()

    _Watch(graph_module, keep).run(*inputs)
    return values


class _evaluating:
    """Run in eval mode with every parameter trained; leave modes, buffers and what is frozen as they were."""

    def __init__(self, graph_module: GraphModule) -> None:
        self._module = graph_module

    def __enter__(self) -> None:
        self._modes = {module: module.training for module in self._module.modules()}
        self._buffers = {name: buffer.detach().clone() for name, buffer in self._module.named_buffers()}
        self._frozen = [p for p in self._module.parameters() if not p.requires_grad and p.is_floating_point()]
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        self._module.eval()

    def __exit__(self, *_: object) -> None:
        for module, mode in self._modes.items():
            module.training = mode
        for parameter in self._frozen:
            parameter.requires_grad_(False)
        with torch.no_grad():
            for name, buffer in self._module.named_buffers():
                buffer.copy_(self._buffers[name])
