"""One recording of a model beside others: the calls it fits, and the parts that it shares with the first one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from fractrain_fx.capture import Read, RecordedModule, Recording, Seen, shapes_of
from fractrain_fx.errors import InputError
from fractrain_fx.model.executed import Running
from fractrain_fx.model.samples import SampleCount
from fractrain_fx.passes.graph.edit import NAMESPACE

__all__ = ["Variant", "share_inserted"]

_LONGEST = 100  # characters of a condition in a message; a longer one is computed from many sizes

# Entries under ``frac`` that recordings do not share: values of one run, and costs that depend on its sizes.
_OWN = ("constants", "mode", "methods", "cost", "dispatched")


@dataclass(frozen=True)
class Variant:
    """One recording, rewritten.

    Attributes:
        recording: the shown graphs.
        running: the copies that run in training (``True``) and evaluation.
        form: the number of the form of call that it was recorded with.
        count: counts the samples of a call.
        dimensions: the number of dimensions of each input.
        reads: for each mode, the circumstances that its code read, each with a function that gives the present value.
    """

    recording: Recording
    running: Mapping[bool, Running]
    form: int
    count: SampleCount
    dimensions: tuple[int, ...]
    reads: Mapping[bool, tuple[tuple[Read, Seen], ...]]

    def misfit(self, values: tuple[Any, ...], training: bool) -> Seen | None:
        """The first circumstance of a call that its code would find changed; ``None`` if the graph fits the call."""
        for read, seen in self.reads[training]:
            if read(values) != seen.value:
                return seen
        return None

    def broken(self, values: tuple[Any, ...], model: nn.Module, training: bool) -> str | None:
        """A condition that a call does not meet, with the line that reads it; ``None`` if the graph fits the call."""
        if tuple(map(len, shapes_of(values))) != self.dimensions:
            return f"inputs of {', '.join(map(str, self.dimensions))} dimensions"
        types = self.recording.other_types(model)
        if types is not None:
            return f"parameters of type {types}, which its code reads"
        if not self.recording.takes_types(values):
            wanted = dict.fromkeys(str(each).removeprefix("torch.") for each in self.recording.input_types if each)
            return f"inputs of type {' and '.join(wanted)}, which its code reads"
        guard = self.recording.broken(values, model, training)
        if guard is None:
            return None
        words = str(guard)
        return f"{words if len(words) <= _LONGEST else 'a size'}, which {guard.place} reads"

    @property
    def graphs(self) -> list[RecordedModule]:
        """The shown graphs and their copies that run."""
        return [*self.recording.graphs, *(each.current() for each in self.running.values())]


def share_inserted(first: Recording, recording: Recording) -> None:
    """Make a recording use the first one's gates, running ranges and stages.

    Raises:
        InputError: it has other blocks, or ops that the first one lacks.
    """
    ours_root = first.train._modules.get(NAMESPACE) or nn.Module()
    root = recording.train.get_submodule(NAMESPACE)
    ours, theirs = (
        {name for name, _ in each.named_modules() if name and not name.startswith(_OWN)} for each in (ours_root, root)
    )
    gates = [{name for name in names if name.startswith("gates.")} for names in (ours, theirs)]
    if not theirs <= ours or gates[0] != gates[1]:
        named = sorted(theirs - ours) or sorted(gates[0] ^ gates[1])
        raise InputError(
            f"other blocks or ops run then ({', '.join(named[:3])}), whose gates and ranges were never "
            "trained; record the model on inputs of its largest size"
        )
    for name in list(root._modules):
        if not name.startswith(_OWN):
            root._modules[name] = ours_root._modules[name]
