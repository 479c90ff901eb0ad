"""One recording of a model beside others: the calls it fits, its samples, and what it shares with the first one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fractrain_fx.capture import (
    PartMode,
    Read,
    ReadCircumstance,
    RecordedModule,
    Recording,
    batch_size,
    forms_of,
    shapes_of,
)
from fractrain_fx.capture.asked import settings_now
from fractrain_fx.capture.checking.check import Batching
from fractrain_fx.capture.inputs.form import look_of
from fractrain_fx.capture.trees import is_strided, items_of, tensors_in
from fractrain_fx.errors import InputError
from fractrain_fx.model.executed import Running
from fractrain_fx.model.recordings.costs_by_size import CostsBySize
from fractrain_fx.nn.quantized_leaf import QuantizedLeaf
from fractrain_fx.passes.graph.edit import NAMESPACE

__all__ = [
    "Call",
    "SampleCount",
    "Variant",
    "Watched",
    "called_by",
    "form_of_call",
    "reads_of",
    "share_inserted",
    "token_count",
]

Call = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Positional and keyword arguments."""

_LONGEST = 100  # characters of a condition in a message; a longer one is computed from many sizes

# Entries under ``frac`` that recordings do not share: values of one run, and costs that depend on its sizes.
_OWN = ("constants", "mode", "methods", "written", "cost", "dispatched")


@dataclass(frozen=True)
class Variant:
    """One recording, rewritten.

    Attributes:
        recording: the shown graphs.
        running: the copies that run in training (``True``) and evaluation.
        form: the number of the form of call that it was recorded with.
        count: counts the samples of a call.
        dimensions: the number of dimensions of each input.
        costs: counts the cost of calls of any sizes, in training and evaluation.
        reads: for each mode, the circumstances that its code read, each with a function that gives the present value.
    """

    recording: Recording
    running: Mapping[bool, Running]
    form: int
    count: SampleCount
    costs: Mapping[bool, CostsBySize]
    dimensions: tuple[int, ...]
    reads: Mapping[bool, tuple[tuple[Read, ReadCircumstance], ...]]

    def changed_circumstance(self, values: tuple[Any, ...], training: bool) -> ReadCircumstance | None:
        """The first circumstance of a call that its code would find changed; ``None`` if the graph fits the call."""
        for read, reading in self.reads[training]:
            if read(values) != reading.value:
                return reading
        return None

    def failed_condition(self, values: tuple[Any, ...], model: nn.Module, training: bool) -> str | None:
        """A condition that a call does not meet, with the line that reads it; ``None`` if the graph fits the call."""
        if tuple(map(len, shapes_of(values))) != self.dimensions:
            return f"inputs of {', '.join(map(str, self.dimensions))} dimensions"
        types = self.recording.other_types(model)
        if types is not None:
            return f"parameters of type {types}, which its code reads"
        if not self.recording.takes_types(values):
            wanted = dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in self.recording.input_types if dtype)
            return f"inputs of type {' and '.join(wanted)}, which its code reads"
        guard = self.recording.failed_guard(values, model, training)
        if guard is None:
            return None
        words = str(guard)
        return f"{words if len(words) <= _LONGEST else 'a size'}, which {guard.place} reads"

    def follow_costs(self, values: tuple[Any, ...], samples: int | None, training: bool) -> None:
        """Let the next forward be counted at the sizes of a call."""
        sizes, costs = self.count.sizes(values, samples), self.costs[training]
        if sizes != costs.now:
            costs.follow(sizes, values, samples)

    @property
    def graphs(self) -> list[RecordedModule]:
        """The shown graphs and their copies that run."""
        return [*self.recording.graphs, *(running.current() for running in self.running.values())]

    def train(self, mode: bool) -> None:
        """Switch the graphs and the modules that were inserted into them, none of which does anything else then."""
        waiting: list[nn.Module | None] = []
        for graph_module in self.graphs:
            graph_module.__dict__["training"] = mode
            waiting.append(graph_module._modules.get(NAMESPACE))
        while waiting:
            module = waiting.pop()
            if module is not None:
                module.__dict__["training"] = mode
                waiting += module._modules.values()


def form_of_call(form: int, values: Sequence[Any]) -> Any:
    """All of a call that decides which recording fits it, but for circumstances: in a call alike only values differ.

    ``form``: the number of the form of call.
    """
    tensors = list(tensors_in(values))
    strides = tuple(x.stride() if is_strided(x) else None for x in tensors)
    return form, forms_of(values), strides, look_of(tensors), settings_now()


def share_inserted(first: Recording, recording: Recording) -> None:
    """Make a recording use the first one's gates, running ranges and stages.

    Raises:
        InputError: it has other blocks, or ops that the first one lacks.
    """
    ours_root = first.train._modules.get(NAMESPACE) or nn.Module()
    root = recording.train.get_submodule(NAMESPACE)
    ours, theirs = (
        {name for name, _ in part.named_modules() if name and not name.startswith(_OWN)} for part in (ours_root, root)
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

    def is_plain(self, args: Sequence[Any]) -> bool:
        """Whether types, sizes and strides tell all of a call: nothing is watched, and all arguments are plain tensors.

        They are strided, of torch's own class, without attributes, and no two are the same object.
        """
        if self._parts or self._reads or not all([type(x) is Tensor and x.layout is torch.strided for x in args]):
            return False
        return not any(map(vars, args)) and (len(args) < 2 or len({id(x) for x in args}) == len(args))

    def add(self, recording: Recording) -> bool:
        """Watch what a recording depends on, too; returns whether any of it is new."""
        new = {reading.circumstance for readings in recording.seen.values() for reading in readings} - self._known
        self._known |= new
        for circumstance in new:
            if isinstance(circumstance, PartMode):
                self._parts.append(self._model.get_submodule(circumstance.path))
            else:
                self._reads.append(circumstance.reader(self._model))
        return bool(new)

    def now(self, values: Sequence[Any]) -> tuple[tuple[bool, ...], tuple[Any, ...]]:
        """The present circumstances of a call with these values for the inputs."""
        return tuple([part.training for part in self._parts]), tuple([read(values) for read in self._reads])


def reads_of(recording: Recording, model: nn.Module) -> Mapping[bool, tuple[tuple[Read, ReadCircumstance], ...]]:
    """For each mode, the circumstances that code read, each with a function that gives the present value."""
    return {
        mode: tuple((reading.circumstance.reader(model), reading) for reading in readings)
        for mode, readings in recording.seen.items()
    }


class _Step(NamedTuple):
    """The way from a container to one of its parts, as data: torch's compiler cannot trace an ``itemgetter``."""

    key: Any
    is_field: bool


class SampleCount:
    """Counts the samples of a call in the tensor that had them in the recorded call.

    The tensor may lie at any depth of lists, tuples, mappings and dataclasses: some models take their whole batch as
    one dictionary. If the recorded call has tensors of several sizes, it is the first one of the most frequent size.

    Args:
        recording: of the model.
        axis: the dimension of the inputs that holds the samples.
    """

    def __init__(self, recording: Recording, axis: int) -> None:
        self._axis = axis
        values = recording.inputs
        size = batch_size(list(tensors_in(values)), axis, packed=recording.batching is Batching.PACKED)
        self._steps = _steps_to(values, axis, size)

    def __call__(self, values: Sequence[Any]) -> int | None:
        """The number of samples of a call with the arguments ``values``; ``None`` if no tensor has samples."""
        if self._steps is None:
            return None
        value: Any = values
        for step in self._steps:
            value = getattr(value, step.key) if step.is_field else value[step.key]
        samples: int = value.shape[self._axis]
        return samples

    def sizes(self, values: Sequence[Any], samples: int | None) -> tuple[tuple[int, ...], ...]:
        """The shapes of a call's tensors, without the dimension that has the samples."""
        axis, shapes = self._axis, [tuple(x.shape) for x in tensors_in(values) if not x.is_nested]
        return tuple(
            (*shape[:axis], *shape[axis + 1 :]) if samples and shape[axis : axis + 1] == (samples,) else shape
            for shape in shapes
        )


def _steps_to(value: Any, axis: int, size: int | None) -> tuple[_Step, ...] | None:
    """The steps from ``value`` to its first tensor with ``size`` samples."""
    if isinstance(value, Tensor):
        return () if value.ndim > axis and value.shape[axis] == size else None
    is_field = not isinstance(value, (Mapping, list, tuple))
    for key, part in items_of(value) or ():
        rest = _steps_to(part, axis, size)
        if rest is not None:
            return (_Step(key, is_field), *rest)
    return None


def called_by(original: nn.Module, recording: Recording) -> set[str]:
    """Paths of the modules that the graphs call, also of those that are called with rounded weights."""
    paths = {id(module): path for path, module in original.named_modules()}
    called = set()
    for graph in recording.graphs:
        for node in graph.graph.find_nodes(op="call_module"):
            module = graph.get_submodule(str(node.target))
            leaf = module.leaf if isinstance(module, QuantizedLeaf) else module
            called.add(paths.get(id(leaf), str(node.target)))
    return called


def token_count(values: Iterable[Any]) -> int | None:
    """The size of the first input that is a matrix of whole numbers: a row of tokens for each sample."""
    for value in values:
        if isinstance(value, Tensor) and value.ndim == 2 and value.dtype in (torch.int64, torch.int32):
            return value.numel()
    return None
