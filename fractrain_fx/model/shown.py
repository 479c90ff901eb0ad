"""What a rewritten model shows of itself: graphs, configuration, kernels, and to what it is tied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.fx import Graph

from fractrain_fx.capture import Guard, RecordedModule
from fractrain_fx.config import FracConfig
from fractrain_fx.model.counted import Counted
from fractrain_fx.model.state import Inside
from fractrain_fx.rewriting import OWN

__all__ = ["Shown"]


class Shown(Counted, nn.Module):
    """The part of :class:`fractrain_fx.FracModel` that only reads."""

    @property
    def _inside(self) -> Inside:
        inside: Inside = self.__dict__[OWN]
        return inside

    @property
    def graph_module(self) -> RecordedModule:
        """The rewritten graph of the present mode (one graph serves both modes for most models).

        What runs is a copy in which each quantized op and its quantize nodes are one op, with the same numbers; a
        change to this graph takes effect once it is recompiled.
        """
        recording = self._inside.recording
        return recording.train if self.training else recording.eval

    @property
    def graph(self) -> Graph:
        """The rewritten ``torch.fx.Graph``."""
        return self.graph_module.graph

    @property
    def code(self) -> str:
        """The Python code of the rewritten graph."""
        return self.graph_module.code

    def print_readable(self, **options: Any) -> str:
        """Print the rewritten graph as ``torch.fx.GraphModule.print_readable`` does."""
        return self.graph_module.print_readable(**options)

    @property
    def config(self) -> FracConfig:
        """The configuration this model was rewritten with."""
        return self._inside.config

    def kernels(self) -> dict[str, str]:
        """How each quantized op multiplies, by name: ``int8``, ``float``, ``not yet timed``, or why it is float.

        With torchao: the numbers in which it computes the op, or why the op stays simulated.
        """
        return self._inside.running[True].kernels()

    @property
    def leaves(self) -> Mapping[str, str]:
        """Modules that were recorded as a whole, with the reason."""
        return self._inside.recording.leaves

    @property
    def guards(self) -> tuple[Guard, ...]:
        """What the model is tied to: sizes that its code looks at, with the lines that look, in training or evaluation.

        A call that does not meet them is recorded anew, or refused (``FracConfig.recordings``).
        """
        found = {str(each): each for guards in self._inside.recording.guards.values() for each in guards.guards}
        return tuple(found.values())

    @property
    def checked(self) -> bool:
        """Whether the recording was compared with the model; tensors without data (meta) cannot be."""
        return self._inside.recording.checked
