"""The copy of a rewritten graph that runs, with its quantized ops fused."""

from __future__ import annotations

import copy

import torch

from fractrain_fx.capture import RecordedModule
from fractrain_fx.config import Saved
from fractrain_fx.passes import Fuse, FuseSkips

__all__ = ["Running"]


class Running:
    """A graph and its copy that runs, whose modules and parameters are those of the graph.

    Args:
        shown: the rewritten graph, with its quantize nodes.
        saved: what fused ops keep of activations between forward and backward.
    """

    def __init__(self, shown: RecordedModule, saved: Saved) -> None:
        self._shown, self._saved = shown, saved
        self._code = ""
        self.graph_module = shown
        self.current()

    def current(self) -> RecordedModule:
        """The copy, made anew where the graph shown was changed and recompiled since."""
        if not torch.compiler.is_compiling() and self._code is not self._shown._code:
            copied = RecordedModule.over(self._shown, self._shown._modules, copy.deepcopy(self._shown.graph))
            Fuse(self._saved)(copied)
            FuseSkips()(copied)
            self.graph_module = copied
            self.graph_module.training = self._shown.training
            self._code = self._shown._code
        return self.graph_module
