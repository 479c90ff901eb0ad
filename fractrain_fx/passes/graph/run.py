"""Run a chain of passes over a graph; run a graph, see each value, and leave modes and buffers as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.passes.infra.pass_base import PassBase
from torch.fx.passes.infra.pass_manager import PassManager

from fractrain_fx.capture import RecordedModule
from fractrain_fx.errors import FracTrainError

__all__ = ["Watch", "evaluating", "run_passes"]


def run_passes(graph_module: RecordedModule, passes: Iterable[PassBase]) -> None:
    """Run a chain by torch's manager, which asks each pass what it requires and ensures; make the code once.

    Raises:
        FracTrainError: what a pass raises, itself; the manager would wrap it.
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
        # All that floats is tracked here already, and torch refuses to switch on what another op made.
        if n.target is setattr and n.args[1] == "requires_grad":
            return None
        value = super().run_node(n)
        self._see(n, value)
        return value


class evaluating:
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
