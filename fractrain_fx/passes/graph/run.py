"""Run a graph and see each value as it is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule, Interpreter, Node

__all__ = ["Watch"]


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
