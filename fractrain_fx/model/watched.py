"""Watch the circumstances of calls that any recording of a model depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from fractrain_fx.capture import PartMode, Read, Recording, Seen

__all__ = ["Watched", "reads_of"]


class Watched:
    """The circumstances that code of a model read while it was recorded.

    Args:
        model: the model that was recorded.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known: set[Any] = set()
        # Modes of parts, of which models have many, are read without a call each.
        self._parts: list[nn.Module] = []
        self._reads: list[Read] = []

    @property
    def is_idle(self) -> bool:
        """Whether no recording depends on anything that is watched."""
        return not (self._parts or self._reads)

    def add(self, recording: Recording) -> bool:
        """Watch what a recording depends on, too; returns whether any of it is new."""
        new = {each.circumstance for seen in recording.seen.values() for each in seen} - self._known
        self._known |= new
        for each in new:
            if isinstance(each, PartMode):
                self._parts.append(self._model.get_submodule(each.path))
            else:
                self._reads.append(each.reader(self._model))
        return bool(new)

    def now(self, values: Sequence[Any]) -> tuple[tuple[bool, ...], tuple[Any, ...]]:
        """The present circumstances of a call with these values for the inputs."""
        return tuple([part.training for part in self._parts]), tuple([read(values) for read in self._reads])


def reads_of(recording: Recording, model: nn.Module) -> Mapping[bool, tuple[tuple[Read, Seen], ...]]:
    """For each mode, the circumstances that code read, each with a function that gives the present value."""
    return {
        mode: tuple((each.circumstance.reader(model), each) for each in seen) for mode, seen in recording.seen.items()
    }
