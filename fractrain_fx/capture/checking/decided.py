"""Test sizes that values may decide at every run: the sizes of a call's inputs, on which guards are checked, do not."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from fractrain_fx.capture.checking.guard_check import SizesWithoutData, needed, without_data
from fractrain_fx.capture.model_errors import model_errors
from fractrain_fx.capture.recording.kept.leaves import Depth, depth_of
from fractrain_fx.capture.recording.kept.one_node import OneNodeError
from fractrain_fx.capture.recording.python_reads import write_test
from fractrain_fx.capture.recording.writer import SHAPE, Obstacle, ValueSource, Writer
from fractrain_fx.capture.sizes.guards import Guard
from fractrain_fx.capture.state import Snapshot
from fractrain_fx.capture.targets import DATA_DEPENDENT, call_name, function_node, operator_name
from fractrain_fx.capture.trees import is_strided

__all__ = ["test_decided_sizes"]

_ELEMENTWISE = frozenset(f"{i}{name}" for i in ("", "i") for name in ("add", "sub", "mul", "truediv", "floordiv"))


def test_decided_sizes(writer: Writer, guards: Iterable[Guard], model: nn.Module) -> None:
    """Write a test for each guard on sizes that cannot be computed without data.

    Args:
        writer: a graph, before any node was erased, and the tensors of its run.
        guards: its guards.
        model: stays as it is.

    Raises:
        OneNodeError: code of parts looks at sizes that calls of torch take from values; they have to stay one call.
    """
    read = {guard: {size.node for size in guard.expression.sizes} for guard in guards}
    wanted = {node for nodes in read.values() for node in nodes if node.op != "placeholder"}
    if not wanted:
        return
    with torch.no_grad(), contextlib.ExitStack() as stack:
        by_torch = _DecidedSizes(writer, model, stack).among(needed(writer.graph, wanted))
    decided = {guard: varying for guard, nodes in read.items() if (varying := nodes & by_torch.keys())}
    parts = [guard for guard, nodes in decided.items() if guard.module and any(map(by_torch.get, nodes))]
    if parts:
        cause = "what it computes depends on a size that data decide ({})"
        raise OneNodeError(
            Obstacle(guard.module, cause.format(guard.expression), (), guard.place.line_only) for guard in parts
        )
    for guard in decided:
        write_test(writer.graph, guard)


class _DecidedSizes(SizesWithoutData):
    """Makes calls of a recorded run again, on tensors of the recorded forms without data.

    ``stack`` puts the model's state back in the end, if code ran that may change it.
    """

    def __init__(self, writer: Writer, model: nn.Module, stack: contextlib.ExitStack) -> None:
        owner = nn.Module()
        vars(owner).update(vars(model))
        owner._modules = {**owner._modules, "frac": writer.additions.root}
        super().__init__(owner, writer.graph, set())
        self._writer, self._model, self._stack = writer, model, stack
        self._tensors, self._safe = writer.tensors(), True

    def among(self, nodes: Collection[Node]) -> dict[Node, bool]:
        """Those of some nodes whose form values may decide.

        Returns:
            Each with whether a call of torch takes it from values. Other code, such as a part that is one call, may
            need values for something else.
        """
        decided: dict[Node, bool] = {}
        for node in filter(nodes.__contains__, self.graph.nodes):
            causes = [decided[operand] for operand in node.all_input_nodes if operand in decided]
            if not causes and self._may_decide(node) and not self._runs(node):
                causes.append(_is_torchs(node))
            if causes and not _keeps_form(node, decided):
                decided[node] = any(causes)
        return decided

    def _may_decide(self, node: Node) -> bool:
        """Whether a call could take a size from values. Torch takes none from floats, unless it counts some of them."""
        if node.op in ("placeholder", "get_attr", "output"):
            return False
        varying = [value for value in (*node.all_input_nodes, node) if self._writer.made_from(value, ValueSource.DATA)]
        tensors = [self._tensors[value] for value in varying if value in self._tensors]
        if not varying or any(x.is_nested for x in tensors):
            return False
        if any(not x.is_floating_point() or not is_strided(x) for x in tensors):
            return True
        if node.op == "call_module":
            part = self.module.get_submodule(str(node.target))
            return not type(part).__module__.startswith("torch.nn.") and depth_of(part) is not Depth.LEAF
        return not _is_torchs(node) or call_name(node.target) in DATA_DEPENDENT

    def _runs(self, node: Node) -> bool:
        if self._safe and not _is_torchs(node):
            self._safe = False
            self._stack.enter_context(Snapshot(self._model, held=()).preserved())
        try:
            self._value(node, again=True)
        except model_errors():
            return False
        return True

    def _value(self, node: Node, again: bool = False) -> Any:
        """The recorded value of a node, without data."""
        if node in self._tensors and not again:
            return without_data(self._tensors[node])
        if node not in self.env:
            for operand in node.all_input_nodes:
                self.env[operand] = self._value(operand)
            self.env[node] = self.run_node(node)
        return self.env[node]


def _keeps_form(node: Node, decided: Collection[Node]) -> bool:
    """Whether an operand of known form gives a sum its form, as the way around a block does."""
    shape = node.meta.get(SHAPE)
    if call_name(node.target) not in _ELEMENTWISE or shape is None or 1 in shape:
        return False
    return any(operand not in decided and operand.meta.get(SHAPE) == shape for operand in node.all_input_nodes)


def _is_torchs(node: Node) -> bool:
    """Whether a node calls torch."""
    library = (operator_name(node.target) or "aten").partition("::")[0]
    closure = getattr(node.target, "__module__", None) == function_node.__module__  # a closure, or code of the model
    return node.op != "call_module" and library == "aten" and not closure
