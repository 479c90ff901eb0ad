"""Run a chain of passes on a graph; run a graph, look at each value, and leave the model as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from traceback import walk_tb
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.passes.infra.pass_base import PassBase
from torch.fx.passes.infra.pass_manager import PassManager
from torch.overrides import TorchFunctionMode

from fractrain_fx.capture import WRITTEN, RecordedModule
from fractrain_fx.capture.recording.regions import NodeByNode
from fractrain_fx.capture.state import Snapshot
from fractrain_fx.errors import FracTrainError

__all__ = ["ValueViewer", "evaluating", "failed_module", "run_passes"]


def run_passes(graph_module: RecordedModule, passes: Iterable[PassBase]) -> None:
    """Run a chain with torch's PassManager, which checks each pass's ``requires`` and ``ensures``; compile once.

    A pass's :class:`FracTrainError` is raised without the manager's error around it.
    """
    try:
        with graph_module.edited():
            PassManager(passes=list(passes))(graph_module)
    except Exception as error:
        if isinstance(error.__cause__, FracTrainError):
            raise error.__cause__ from None
        raise


def failed_module(error: BaseException) -> str | None:
    """The path of the module that a graph called when it raised; ``None`` if another call did, or no run of a graph."""
    run = Interpreter.run_node.__code__
    nodes = [frame.f_locals["n"] for frame, _ in walk_tb(error.__traceback__) if frame.f_code is run]
    return str(nodes[-1].target) if nodes and nodes[-1].op == "call_module" else None


class ValueViewer(NodeByNode):
    """Run a graph and show each value to ``see`` the moment it is made (later nodes may change it in place)."""

    def __init__(self, graph_module: GraphModule, see: Callable[[Node, Any], None]) -> None:
        super().__init__(graph_module)
        self._see = see

    def run_node(self, n: Node) -> Any:
        # Every float tensor is tracked here already, and torch refuses to set requires_grad on the result of an op.
        if n.target is setattr and n.args[1] == "requires_grad":
            return None
        value = super().run_node(n)
        self._see(n, value)
        return value


class _StatisticsApart(TorchFunctionMode):
    """Cuts the running statistics of norms from gradients, which torch refuses: they may be frozen parameters."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (F.batch_norm, F.instance_norm):
            args = (*args[:1], *map(_cut, args[1:3]), *args[3:])
            kwargs = {name: _cut(x) if name in ("running_mean", "running_var") else x for name, x in kwargs.items()}
        return func(*args, **kwargs)


def _cut(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()


@contextlib.contextmanager
def evaluating(graph_module: GraphModule) -> Iterator[None]:
    """Run in eval mode with every parameter trained that the model does not write to; leave all as it was."""
    written = graph_module.meta.get(WRITTEN, ())
    named = graph_module.named_parameters()
    frozen = [p for name, p in named if not p.requires_grad and p.is_floating_point() and name not in written]
    with Snapshot(graph_module).preserved(), _StatisticsApart():
        for parameter in frozen:
            parameter.requires_grad_(True)
        graph_module.eval()
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
