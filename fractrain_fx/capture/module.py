"""A graph module on another module's children and parameters: same objects, same paths, same state_dict keys."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule

from fractrain_fx.errors import CaptureError

__all__ = ["RecordedModule"]


class RecordedModule(GraphModule):
    """A :class:`torch.fx.GraphModule` on the dictionaries of the module it was recorded from.

    ``_modules`` holds the original children plus ``frac``; parameters, buffers and the list of non-persistent
    buffers are the original's own dictionaries, so that weights stay shared and ties stay ties.
    """

    @classmethod
    def over(cls, model: nn.Module, modules: dict[str, nn.Module | None], graph: Graph) -> RecordedModule:
        """Put a graph on the model that was recorded; ``modules`` are the children, which two recordings may share."""
        recorded = cls(nn.Module(), Graph(), class_name=f"Recorded{type(model).__name__}")
        recorded.__dict__.update(
            _modules=modules,
            _parameters=model._parameters,
            _buffers=model._buffers,
            _non_persistent_buffers_set=model._non_persistent_buffers_set,
            training=model.training,
        )
        recorded.graph = graph
        return recorded

    def set_mode(self, train: bool) -> None:
        """Switch the graph and what was inserted to a mode. The modules of the original keep theirs."""
        self.__dict__["training"] = train
        self.get_submodule("frac").train(train)

    @contextlib.contextmanager
    def edited(self) -> Iterator[None]:
        """Generate code once for all changes inside; torch's pass manager would generate it after every pass."""
        self.__dict__["_waits"] = True
        try:
            yield
        finally:
            del self.__dict__["_waits"]
        self.recompile()

    def recompile(self) -> Any:
        """Generate the graph's code, unless more changes follow."""
        if self.__dict__.get("_waits"):
            return None
        code = super().recompile()
        # fx gives the class a ``__call__`` that prints the generated code when a node fails; nn.Module's is enough.
        if "__call__" in vars(type(self)):
            del type(self).__call__
        return code

    def __deepcopy__(self, memo: dict[int, Any]) -> RecordedModule:
        """A copy with every child, container class, unused parameter and tie; modules in ``memo`` are reused."""
        duplicate = RecordedModule.__new__(RecordedModule)
        memo[id(self)] = duplicate
        for name, value in self.__dict__.items():
            if name != "_graph":
                duplicate.__dict__[name] = copy.deepcopy(value, memo)
        type(duplicate).__name__ = type(self).__name__
        duplicate.graph = copy.deepcopy(self._graph, memo)
        return duplicate

    def __reduce__(self) -> Any:
        raise CaptureError(
            "a recorded graph is not pickled, because torch would trace it again and lose what passes noted on it; "
            "save the state_dict and record the model again"
        )
