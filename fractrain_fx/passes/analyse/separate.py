"""Run each skippable block on a part of the batch: it must give the values that it gives in the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fractrain_fx.capture import RecordedModule, batch_size, resize_batch
from fractrain_fx.capture.recording.regions import NodeByNode
from fractrain_fx.capture.state import seeded
from fractrain_fx.capture.trees import holds_tensor
from fractrain_fx.execution.blocks.dispatched_block import rows_of, share_of
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.passes.analyse.shapes import examples_of
from fractrain_fx.passes.graph.branches import Part, ends_of, inseparable, part_of, skippable
from fractrain_fx.passes.graph.facts import Block, facts
from fractrain_fx.passes.graph.run import ValueViewer, evaluating

__all__ = ["FindSeparableBlocks"]

# Relative to the largest value: a product of fewer rows may be summed in another order.
_ROUNDING = 1e-3


class FindSeparableBlocks(PassBase):
    """Note which numbers of a graph grow with the batch, and which blocks cannot run for a part of their samples.

    Each branch that can be skipped is run for the last sample alone, in evaluation, and compared with that sample's
    rows in the batch. This reveals what the rules of :func:`part_of` miss, such as an index that counts samples.
    Tensors without data (meta) are not compared.

    Requires: ``node.meta["example"]`` on every placeholder, and decided precisions. Ensures:
    ``Block.inseparable_because`` holds the reason for each block that cannot.

    Args:
        batch_axis: dimension of the model's inputs that holds the samples.
    """

    def __init__(self, batch_axis: int = 0) -> None:
        super().__init__()
        self.batch_axis = batch_axis

    def requires(self, graph_module: GraphModule) -> None:
        examples_of(graph_module)

    def call(self, graph_module: GraphModule) -> PassResult:
        recorded = cast("RecordedModule", graph_module)
        ends, reason = ends_of(graph_module.graph), inseparable(recorded)
        for block in skippable(graph_module.graph):
            block.inseparable_because = reason
        if ends and reason is None:
            self._try(recorded, ends)
        return PassResult(graph_module, bool(ends))

    def _try(self, graph_module: RecordedModule, ends: dict[Node, Block]) -> None:
        examples = examples_of(graph_module)
        size = max(batch_size(examples, self.batch_axis) or 0, 2)
        grown: dict[Node, Any] = {}
        with evaluating(graph_module), torch.no_grad(), seeded():
            batch = resize_batch(examples, size + 1, self.batch_axis)
            ValueViewer(graph_module, lambda node, value: grown.update(_plain(node, value))).run(*batch)
            _Trial(graph_module, ends, grown, size).run(*resize_batch(examples, size, self.batch_axis))


class _Trial(NodeByNode):
    """Runs the graph, and each branch again for the last sample as soon as the branch has its value."""

    def __init__(
        self, graph_module: RecordedModule, ends: dict[Node, Block], grown: dict[Node, Any], size: int
    ) -> None:
        super().__init__(graph_module, garbage_collect_values=False)
        self._recorded, self._ends, self._grown, self._size = graph_module, ends, grown, size

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n in self._grown:
            facts(n).grows = _grows(value, self._grown[n], self._size)
        block = self._ends.get(n)
        if block is not None and block.inseparable_because is None:
            part = part_of(self._recorded, block, n)
            block.inseparable_because = part if isinstance(part, str) else self._alone(part, value)
        return value

    def _alone(self, part: Part, together: Tensor) -> str | None:
        """The reason a branch gives a sample alone something else than in the batch; ``None`` if it does not."""
        last = torch.tensor([self._size - 1], device=together.device)
        inputs = [
            rows_of(self.env[node], kind, last, self._size)
            if isinstance(kind, BatchAxis)
            else share_of(self.env[node], 1, self._size)
            if kind == "count"
            else self.env[node]
            for node, kind in zip(part.inputs, part.given, strict=True)
        ]
        try:
            alone = Interpreter(part.module(self._recorded)).run(*inputs)
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
            return f"it does not run for a part of the samples ({str(error).splitlines()[0]})"
        expected = rows_of(together, part.axis, last, self._size)
        if alone.shape != expected.shape:
            return "it gives another shape for a part of the samples"
        if expected.is_meta:
            return None
        largest = float(expected.abs().nan_to_num(0.0, 0.0, 0.0).max()) if expected.numel() else 0.0
        same = torch.isclose(alone, expected, rtol=_ROUNDING, atol=_ROUNDING * largest, equal_nan=True).all()
        return None if same else "it gives a sample other values when the others are left out"


def _plain(node: Node, value: Any) -> dict[Node, Any]:
    """The node with its value, if that holds no tensor."""
    return {} if holds_tensor(value) else {node: value}


def _grows(value: Any, grown: Any, size: int) -> bool | None:
    """Whether a number is proportional to the number of samples, from its values at ``size`` and ``size + 1``."""
    if isinstance(value, int) and isinstance(grown, int) and value != grown:
        return True if value * (size + 1) == grown * size else None
    return False if _same(value, grown) else None


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, Sequence) and isinstance(other, Sequence) and not isinstance(value, str):
        return len(value) == len(other) and all(map(_same, value, other))
    return bool(type(value) is type(other) and (value is other or value == other or repr(value) == repr(other)))
