"""Run the graph to learn the shape, dtype, gradient and batch axis of every tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fractrain_fx.capture import batch_size, resize_batch
from fractrain_fx.capture.trees import is_strided, map_tensors, tensors_in
from fractrain_fx.errors import PassError
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.passes.analyse.folds import Fold, folds_by_change, folds_by_origin
from fractrain_fx.passes.analyse.trained import find_trained
from fractrain_fx.passes.graph.edit import varying
from fractrain_fx.passes.graph.facts import FIXED_BATCH, facts, fixed_batch
from fractrain_fx.passes.graph.run import ValueViewer, evaluating

__all__ = ["Shapes", "examples_of"]

_EXAMPLE = "example"


class Shapes(PassBase):
    """Annotate each node with shape, dtype, whether autograd reaches it, and its batch axis.

    The batch axis is the one dimension that grows in proportion to the batch. If several of its rows belong to one
    sample (windows or heads folded into the batch), one sample is changed to see which rows change. A graph that runs
    at one batch size only has no batch axis, and its whole batch counts as one sample. The pass finds this out unless
    ``graph_module.meta["fixed_batch"]`` says so.

    Requires: ``node.meta["example"]`` on every placeholder. Ensures: a record on every node whose value is a tensor.
    """

    def __init__(self, batch_axis: int = 0) -> None:
        super().__init__()
        self.batch_axis = batch_axis

    def requires(self, graph_module: GraphModule) -> None:
        examples_of(graph_module)

    def call(self, graph_module: GraphModule) -> PassResult:
        examples = examples_of(graph_module)
        with evaluating(graph_module), torch.enable_grad():
            fixed = self._measure(graph_module, examples)
        graph_module.meta[FIXED_BATCH] = fixed
        find_trained(graph_module, _EXAMPLE)
        return PassResult(graph_module, True)

    def _measure(self, graph_module: GraphModule, examples: list[Any]) -> bool:
        """Annotate the nodes; whether the graph runs at one batch size only."""
        packed, grown = self._kind(graph_module, examples)
        if not grown:
            # Samples cannot be told apart: gates choose once for all, and the cost of a call is divided among them.
            _view(graph_module, examples)
            for node in varying(graph_module.graph):
                facts(node).samples, facts(node).batch = batch_size(examples, self.batch_axis), BatchAxis(whole=True)
            return True
        size = self._samples(examples, packed)
        batch = resize_batch(examples, size, self.batch_axis, packed=packed)
        _view(graph_module, batch)
        folded: dict[Node, Fold] = {}
        for node, other in grown.items():
            place = _growing(facts(node).shape or (), other, size)
            facts(node).samples = size if place is not None else None
            if place is not None and place[1] == 1:
                facts(node).batch = BatchAxis(place[0])
            elif place is not None:
                folded[node] = place
        if not folded:
            return False
        if any(x.is_meta for x in tensors_in(examples)):
            places = folds_by_origin(graph_module, batch, size, folded)
        else:
            places = folds_by_change(graph_module, batch, size, self.batch_axis, folded, packed=packed)
        for node, axis in places.items():
            facts(node).batch = axis
        return False

    def _grown(self, graph_module: GraphModule, examples: list[Any], packed: bool) -> dict[Node, tuple[int, ...]]:
        """Shapes with one more sample; empty if the graph does not run with it."""
        if not batch_size(examples, self.batch_axis, packed=packed):
            return {}
        grown = resize_batch(examples, self._samples(examples, packed) + 1, self.batch_axis, packed=packed)
        shapes: dict[Node, tuple[int, ...]] = {}

        def measure(node: Node, value: Any) -> None:
            if isinstance(value, Tensor) and not value.is_nested:
                shapes[node] = tuple(value.shape)

        try:
            with torch.no_grad():
                ValueViewer(graph_module, measure).run(*grown)
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
            return {}
        return shapes

    def _kind(self, graph_module: GraphModule, examples: list[Any]) -> tuple[bool, dict[Node, tuple[int, ...]]]:
        """Whether samples are packed in rows, and the shapes with one more sample (none at a fixed batch size)."""
        if not fixed_batch(graph_module):
            for packed in (False, True):
                if shapes := self._grown(graph_module, examples, packed):
                    return packed, shapes
        return False, {}

    def _samples(self, examples: list[Any], packed: bool) -> int:
        """The number of samples to run with: that of the example, at least two."""
        return max(batch_size(examples, self.batch_axis, packed=packed) or 0, 2)

    def ensures(self, graph_module: GraphModule) -> None:
        if not any(facts(node).shape is not None for node in graph_module.graph.nodes):
            raise PassError("no node of the graph gives a tensor; was it recorded with example inputs?")


def examples_of(graph_module: GraphModule) -> list[Any]:
    """The example value of each of a graph's inputs."""
    inputs = graph_module.graph.find_nodes(op="placeholder")
    for node in inputs:
        if _EXAMPLE not in node.meta:
            raise PassError(f"input {node.name!r} has no example value in node.meta['example'] to run with")
    return [node.meta[_EXAMPLE] for node in inputs]


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


def _annotate(node: Node, value: Any) -> None:
    record = facts(node)
    record.batch = record.samples = record.shape = record.layout = None
    if isinstance(value, Tensor):
        record.tensors, record.flows = True, value.requires_grad
        record.dtype = value.dtype
        record.channels_last = not value.is_nested and _channels_last(value)
        record.layout = "nested" if value.is_nested else None if is_strided(value) else "sparse"
        record.shape = None if value.is_nested else tuple(value.shape)
    else:
        tensors = list(tensors_in(value))
        record.tensors, record.flows = bool(tensors), any(tensor.requires_grad for tensor in tensors)


def _channels_last(x: Tensor) -> bool:
    images = x.ndim == 4 and is_strided(x) and not x.is_contiguous()
    return images and x.is_contiguous(memory_format=torch.channels_last)


def _view(graph_module: GraphModule, inputs: list[Any]) -> None:
    """Annotate the nodes of a run in which autograd follows the inputs, if the model's own code allows it.

    A part that turns its input into an array of numpy does not. Gradients of what parameters precede are seen anyway.
    """
    try:
        ValueViewer(graph_module, _annotate).run(*_tracked(inputs))
    except RuntimeError:
        ValueViewer(graph_module, _annotate).run(*map_tensors(inputs, lambda x: x.clone()))


def _tracked(inputs: list[Any]) -> list[Any]:
    """Copies of the inputs that autograd follows and that in-place ops may change."""

    def track(x: Tensor) -> Tensor:
        return x.detach().requires_grad_().clone() if x.is_floating_point() or x.is_complex() else x

    return list(map_tensors(inputs, track))
