"""Run a chain of passes on a graph; run a graph, look at each value, and leave the model as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.fx import GraphModule, Interpreter, Node
from torch.fx.passes.infra.pass_base import PassBase
from torch.fx.passes.infra.pass_manager import PassManager

from fractrain_fx.capture import RecordedModule
from fractrain_fx.capture.state import Snapshot
from fractrain_fx.errors import FracTrainError

__all__ = ["Watch", "evaluating", "run_passes"]


def run_passes(graph_module: RecordedModule, passes: Iterable[PassBase]) -> None:
    """Run a chain with torch's PassManager, which checks each pass's ``requires`` and ``ensures``; compile once.

    Raises:
        FracTrainError: the error that a pass raised, without the manager's error around it.
    """
    try:
        with graph_module.edited():
            PassManager(passes=list(passes))(graph_module)
    except Exception as error:
        if isinstance(error.__cause__, FracTrainError):
            raise error.__cause__ from None
        raise


class Watch(Interpreter):
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


@contextlib.contextmanager
def evaluating(graph_module: GraphModule) -> Iterator[None]:
    """Run in eval mode with every parameter trained; leave values, attributes and what is frozen as they were."""
    frozen = [p for p in graph_module.parameters() if not p.requires_grad and p.is_floating_point()]
    with Snapshot(graph_module).preserved():  # a forward may write to parameters, too: codebooks do
        for parameter in frozen:
            parameter.requires_grad_(True)
        graph_module.eval()
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
