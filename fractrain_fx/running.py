"""The copy of a rewritten graph that runs: with fused ops, and on request without the samples that skip."""

from __future__ import annotations

import copy

import torch

from fractrain_fx.capture import RecordedModule
from fractrain_fx.config import FracConfig
from fractrain_fx.passes import Dispatch, Fuse, FuseSkips

__all__ = ["Running"]


class Running:
    """A graph and its copy that runs, whose modules and parameters are those of the graph.

    Args:
        shown: the rewritten graph, with its quantize nodes.
        config: what fused ops keep of activations between forward and backward, and how skipped blocks run.
        place: under ``frac.``, where the modules of this graph alone lie.
    """

    def __init__(self, shown: RecordedModule, config: FracConfig, place: str = "dispatched") -> None:
        self._shown, self._config, self._place = shown, config, place
        self._code = ""
        self.graph_module = shown
        self.current()

    def current(self) -> RecordedModule:
        """The copy, made anew where the graph shown was changed and recompiled since."""
        if not torch.compiler.is_compiling() and self._code is not self._shown._code:
            copied = RecordedModule.over(self._shown, self._shown._modules, copy.deepcopy(self._shown.graph))
            Fuse(self._config.saved)(copied)
            if self._config.dispatches:
                Dispatch(self._config.dispatch_from, self._place)(copied)
            FuseSkips()(copied)
            self.graph_module = copied
            self.graph_module.training = self._shown.training
            self._code = self._shown._code
        return self.graph_module
