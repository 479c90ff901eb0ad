"""Several recordings of one model, chosen by their guards: sizes may change the path that its code takes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.fx.passes.infra.pass_base import PassBase
from torch.utils import _pytree as pytree

from fractrain_fx.capture import Form, RecordedModule, Recording, forms_of, record, shapes_of
from fractrain_fx.config import FracConfig
from fractrain_fx.errors import FracTrainError, InputError
from fractrain_fx.execution.int8.timing import Tuner
from fractrain_fx.model.executed import Running
from fractrain_fx.passes import default_passes
from fractrain_fx.passes.graph.edit import NAMESPACE
from fractrain_fx.rewriting import rewrite_graphs
from fractrain_fx.tied.float_calls import forget_notices

__all__ = ["Variant", "Variants"]

T = TypeVar("T")

_LOG = logging.getLogger(__name__)

# Entries under ``frac`` that recordings do not share: values of one run, and costs that depend on its sizes.
_OWN = ("constants", "mode", "methods", "cost", "dispatched")


@dataclass(frozen=True)
class Variant:
    """One recording, rewritten.

    Attributes:
        recording: the shown graphs.
        running: the copies that run in training (``True``) and evaluation.
        dimensions: the number of dimensions of each input.
    """

    recording: Recording
    running: Mapping[bool, Running]
    dimensions: tuple[int, ...]

    def broken(self, values: tuple[Any, ...], model: nn.Module, training: bool) -> str | None:
        """A condition that a call does not meet, with the line that reads it; ``None`` if the graph fits the call."""
        if tuple(map(len, shapes_of(values))) != self.dimensions:
            return f"inputs of {', '.join(map(str, self.dimensions))} dimensions"
        guard = self.recording.broken(values, model, training)
        return None if guard is None else f"{guard}, which {guard.place} reads"

    @property
    def graphs(self) -> list[RecordedModule]:
        """The shown graphs and their copies that run."""
        return [*self.recording.graphs, *(each.current() for each in self.running.values())]


class Variants:
    """The recordings of a model; users see the first one.

    Args:
        original: the model.
        first: its recording, rewritten.
        config: the configuration it was rewritten with.
        passes: the chain of passes that rewrote it, if not the default one.

    Attributes:
        first: the recording that users see.
    """

    def __init__(
        self, original: nn.Module, first: Recording, config: FracConfig, passes: Sequence[PassBase] | None = None
    ) -> None:
        self._original, self._config, self._passes = original, config, passes
        self._tuner = Tuner(config.kernels, compiled=config.rounding == "compiled")
        self.first = self._variant(first)
        self._others: list[Variant] = []
        self._chosen: dict[Any, Variant] = {}
        self._holds_always = not any(guards.all for guards in first.guards.values())
        self._fixed: set[int] = set()
        self._note_fixed(first)

    def __iter__(self) -> Iterator[Variant]:
        yield self.first
        yield from self._others

    def choose(
        self, values: tuple[Any, ...], call: tuple[tuple[Any, ...], Mapping[str, Any]], training: bool
    ) -> Variant:
        """The recording that fits a call; a new one if none does.

        Args:
            values: for the inputs of the graph.
            call: the arguments of the model that the values come from.
            training: the mode of the call.

        Raises:
            InputError: no recording fits these sizes, and the model cannot be recorded for them.
        """
        if torch.compiler.is_compiling():
            if self._fixed:
                raise InputError(
                    "torch.compile cannot compare the values of inputs, and this model was recorded for certain values "
                    "(model.guards lists them): run it in eager mode"
                )
            if self._holds_always and tuple(map(len, shapes_of(values))) == self.first.dimensions:
                return self.first  # its sizes may be symbols of the compiler
            place = _place_of(self, training, forms_of(values))
            if place < 0:
                raise InputError(
                    "torch.compile meets sizes for which the model was not recorded: call it once in eager mode "
                    "on such a batch, which records it again if that is possible"
                )
            return self._at(place)
        key = (training, shapes_of(values), tuple(str(values[i].tolist()) for i in self._fixed))
        found = self._chosen.get(key)
        if found is None:
            found = self._chosen[key] = self._find(values, call, training)
        return found

    def train(self, mode: bool) -> None:
        """Switch the modules that only later recordings have."""
        for variant in self._others:
            variant.recording.train.get_submodule(NAMESPACE).train(mode)

    def forget(self) -> None:
        """Drop all recordings but the first: the model moved, and the others hold tensors that did not move."""
        self._others.clear()
        self._chosen.clear()

    def _at(self, place: int) -> Variant:
        return self.first if place == 0 else self._others[place - 1]

    def place_for(self, training: bool, forms: Sequence[Form]) -> int:
        """The number of the recording that fits tensors of certain forms; -1 if none does."""
        made = iter([torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in forms])
        recording = self.first.recording
        example = recording.call.bind(recording.args, recording.kwargs)
        values = pytree.tree_map_only(torch.Tensor, lambda _: next(made), example)
        for place, variant in enumerate(self):
            if variant.broken(values, self._original, training) is None:
                return place
        return -1

    def _find(
        self, values: tuple[Any, ...], call: tuple[tuple[Any, ...], Mapping[str, Any]], training: bool
    ) -> Variant:
        conditions = []
        for variant in self:
            condition = variant.broken(values, self._original, training)
            if condition is None:
                return variant
            conditions.append(condition)
        refused = self._refusal()
        if refused is None:
            try:
                return _not_compiled(self._record)(call, training, conditions[0])
            except FracTrainError as error:
                refused = f"It cannot be recorded again for this call: {error}"
        raise InputError(
            f"{type(self._original).__name__} was recorded for {conditions[0]}; this call has inputs of shape "
            f"{_told(values)}. {refused}"
        )

    def _note_fixed(self, recording: Recording) -> None:
        """Note the inputs whose values decide which recording fits."""
        before = len(self._fixed)
        self._fixed |= {each.index for guards in recording.guards.values() for each in guards.values}
        if len(self._fixed) > before:
            self._chosen.clear()

    def _refusal(self) -> str | None:
        """The reason that the model cannot be recorded again; ``None`` if it can."""
        count = 1 + len(self._others)
        if count >= self._config.recordings:
            return (
                f"It has {count} recordings already: set FracConfig(recordings=...) higher, pad inputs to a few "
                "sizes, or move that code into a submodule"
            )
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if distributed and any(isinstance(each, nn.SyncBatchNorm) for each in self._original.modules()):
            return (
                "Batch norms that wait for other processes cannot be recorded in one process: pass inputs of one size"
            )
        return None

    def _record(self, call: tuple[tuple[Any, ...], Mapping[str, Any]], training: bool, condition: str) -> Variant:
        config, original = self._config, self._original
        args, kwargs = call
        forget_notices(original)
        with torch.inference_mode(False):
            recording = record(original, args, kwargs, batch_axis=config.batch_axis)
            passes = default_passes(config) if self._passes is None else self._passes
            rewrite_graphs(original, recording, passes)
        self._share(recording)
        variant = self._variant(recording, f"dispatched_{len(self._others) + 1}")
        self._others.append(variant)
        self._note_fixed(recording)
        for graph in variant.graphs:
            graph.training = training
        self.train(training)
        _LOG.warning(
            "%s is recorded again (%d of at most %d recordings), because this call does not meet: %s",
            type(original).__name__,
            1 + len(self._others),
            config.recordings,
            condition,
        )
        return variant

    def _share(self, recording: Recording) -> None:
        """Make a recording use the first one's gates, running ranges and stages.

        Raises:
            InputError: it has other blocks, or ops that the first one lacks.
        """
        first = self.first.recording.train._modules.get(NAMESPACE) or nn.Module()
        root = recording.train.get_submodule(NAMESPACE)
        own = [name for name in root._modules if name.startswith(_OWN)]
        ours, theirs = (
            {name for name, _ in each.named_modules() if name and not name.startswith(_OWN)} for each in (first, root)
        )
        gates = [{name for name in names if name.startswith("gates.")} for names in (ours, theirs)]
        if not theirs <= ours or gates[0] != gates[1]:
            named = sorted(theirs - ours) or sorted(gates[0] ^ gates[1])
            raise InputError(
                f"other blocks or ops run then ({', '.join(named[:3])}), whose gates and ranges were never "
                "trained; record the model on inputs of its largest size"
            )
        for name in list(root._modules):
            if name not in own:
                root._modules[name] = first._modules[name]

    def _variant(self, recording: Recording, place: str = "dispatched") -> Variant:
        places = (place, f"{place}_in_evaluation")
        made = [
            Running(shown, self._config, self._tuner, each)
            for shown, each in zip(recording.graphs, places, strict=False)
        ]
        example = recording.call.bind(recording.args, recording.kwargs)
        return Variant(recording, {True: made[0], False: made[-1]}, tuple(map(len, shapes_of(example))))


def _place_of(variants: Variants, training: bool, forms: Sequence[Form]) -> int:
    """Called once for each set of sizes that is compiled."""
    return variants.place_for(training, forms)


# The same as ``torch.compiler.assume_constant_result``, which would import the compiler here.
_place_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _not_compiled(function: Callable[..., T]) -> Callable[..., T]:
    """The function, which the compiler (if it runs) is to call and not to look into."""
    dynamo = sys.modules.get("torch._dynamo")
    return function if dynamo is None else dynamo.disable(function)


def _told(values: Any) -> str:
    return ", ".join(str(tuple(shape)) for shape in shapes_of(values))
