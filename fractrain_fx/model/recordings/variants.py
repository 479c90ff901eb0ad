"""Several recordings of one model, chosen by the arguments of a call and by guards.

Other arguments, and other sizes, may change the path that the model's code takes.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from operator import is_
from typing import Any, TypeVar

import torch

from fractrain_fx.capture import Recording, Surroundings, record, shapes_of
from fractrain_fx.capture.asked import settings_now
from fractrain_fx.capture.circumstances.notices import forget_notices
from fractrain_fx.capture.inputs.form import look_of
from fractrain_fx.capture.trees import is_strided, tensors_in
from fractrain_fx.errors import FracTrainError, InputError
from fractrain_fx.execution.codes.timing import Tuner
from fractrain_fx.model.executed import Running
from fractrain_fx.model.failures import differences_in_words, no_more_recordings, other_differences, refused_again
from fractrain_fx.model.recordings.compared_calls import ComparedCalls, decided_by_values
from fractrain_fx.model.recordings.compiled_calls import CompiledCalls
from fractrain_fx.model.recordings.costs_by_size import costs_of
from fractrain_fx.model.recordings.variant import (
    Call,
    SampleCount,
    Variant,
    Watched,
    form_of_call,
    reads_of,
    share_inserted,
)
from fractrain_fx.passes import default_passes
from fractrain_fx.passes.analyse.sequence_first import sequence_first_parts
from fractrain_fx.rewriting import Rewritten, rewrite_graphs

__all__ = ["Variant", "Variants"]

T = TypeVar("T")
Values = tuple[Any, ...]

_LOG = logging.getLogger(__name__)


def _outside_the_compiler(function: Callable[..., T]) -> Callable[..., T]:
    """The function, which the compiler (if it runs) is to call and not to look into."""
    disabled: Callable[..., T] | None = None

    def call(*args: Any) -> T:
        nonlocal disabled
        if disabled is None and (dynamo := sys.modules.get("torch._dynamo")):
            disabled = dynamo.disable(function)
        return (disabled or function)(*args)

    return call


class Variants:
    """The recordings of a model; users see the first one.

    Args:
        rewritten: the model with its first recording.

    Attributes:
        first: the recording that users see.
        compared: the comparisons with the model.
        closed: the reason that the model is not recorded again from now on, with the way out, as a sentence for the
            message; ``None`` if it may be.
        on_recorded: called with each further recording.
    """

    def __init__(self, rewritten: Rewritten) -> None:
        original, first, config = rewritten.original, rewritten.recording, rewritten.config
        self._original, self._config, self._passes = original, config, rewritten.chain
        self._tuner = Tuner.of(config)
        self._forms = [first.call]
        self.first = self._variant(first, 0)
        self._others: list[Variant] = []
        self._chosen: dict[Any, Variant] = {}
        self._quick: dict[Any, Variant] = {}  # of calls with nothing but tensors
        self._guarded = any(guards.all for guards in first.guards.values())
        self._holds_always = self._always()
        self.closed: str | None = None
        self.on_recorded: Callable[[Recording], object] = id
        self._fixed: dict[int, set[int]] = {}
        self._compiled_calls = CompiledCalls(original, self.first, self)
        self._watched = Watched(original)
        self.compared = ComparedCalls(original, config.run.compared_calls, config.run.compare_every)
        self._unsure: Variant | None = None  # recorded for a difference, and not yet compared on another call
        self._recorded = {form_of_call(0, first.inputs)}
        self._note_conditions(0, first)

    def __iter__(self) -> Iterator[Variant]:
        yield self.first
        yield from self._others

    def choose(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool) -> tuple[Variant, Values]:
        """The recording that fits a call, and the values for the inputs of its graph; a new one if none fits.

        Args:
            args: positional arguments of the model.
            kwargs: keyword arguments of the model.
            training: the mode of the call.

        Raises:
            InputError: no recording fits this call, and the model cannot be recorded for it.
        """
        if torch.compiler.is_compiling():
            form, values, _ = self._bound(args, kwargs)
            return self._compiled(form, values, training), values
        return self._counted(args, kwargs, training)

    @_outside_the_compiler
    def _counted(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool) -> tuple[Variant, Values]:
        variant, values = self._choose(args, kwargs, training)
        if self.closed is None:
            self.compared.count(variant, (args, kwargs), training)
        return variant, values

    def _choose(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool) -> tuple[Variant, Values]:
        settings, quick = settings_now(), None
        if not kwargs and self._watched.is_plain(args):
            quick = training, settings, *[(x.shape, x.dtype, x.stride()) for x in args]
            if quick in self._quick:
                return self._quick[quick], args
        form, values, why = self._bound(args, kwargs)
        sizes, layouts, tensors = [], [], list(tensors_in(values))
        for x in tensors:
            plain = is_strided(x)
            sizes.append((x.shape, x.stride()) if plain else shapes_of(x))
            layouts.append((x.dtype, len(x.shape), plain and x.is_contiguous()))
        fixed = [str(values[i].tolist()) for i in self._fixed.get(form, ())]
        look = look_of(tensors)
        kind = (form, training, *layouts, *fixed, self._watched.now(values), settings, look.kinds)
        key = kind, tuple(sizes), look.attributes
        variant = self._chosen.get(key)
        if variant is None:
            variant = self._find(form, values, (args, kwargs), training, why, kind)
            values = values if why is None else variant.recording.call.bind(args, kwargs)
            self._compiled_calls.note(form, values, training, variant)
            if look.attributes and self.compared.differed:
                self._compiled_calls.by_attributes = True
            if variant is self._unsure:
                return variant, values
            self._chosen[key] = variant
        if quick is not None and not fixed and len(values) == len(args) and all(map(is_, values, args)):
            self._quick[quick] = variant
        return variant, values

    def train(self, mode: bool) -> None:
        """Switch the graphs and the modules that were inserted into them."""
        for variant in self:
            variant.train(mode)

    def forget(self) -> None:
        """Drop all recordings but the first: the model moved, and the others hold tensors that did not move.

        After a cast, the first one may not fit either.
        """
        self._others.clear()
        self._forget_choices()
        self._recorded.clear()
        del self._forms[1:]
        self._holds_always = self._always()

    def _forget_choices(self) -> None:
        for choices in (self._chosen, self._quick, self._compiled_calls):
            choices.clear()

    def _always(self) -> bool:
        """Whether the first recording fits all sizes."""
        return not self._guarded and self.first.recording.other_types(self._original) is None

    def _bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, Values, str | None]:
        """The number of the form that a call has, and its values; for a new form, how it differs from the first."""
        why = None
        for form, spec in enumerate(self._forms):
            try:
                return form, spec.bind(args, kwargs), None
            except InputError as error:
                why = why or str(error)
        return len(self._forms), (), why

    def _compiled(self, form: int, values: Values, training: bool) -> Variant:
        if self._fixed:
            raise InputError(
                "torch.compile cannot compare the values of inputs, and this model was recorded for certain values "
                "(model.guards lists them): run it in eager mode"
            )
        first = self.first
        alike = form == 0 and tuple(map(len, shapes_of(values))) == first.dimensions
        alike = alike and self._holds_always and not self.compared.differed
        alike = alike and first.recording.takes_types(values)
        return self._compiled_calls.choose(form, values, training, (self.first, *self._others), as_first=alike)

    def _find(self, form: int, values: Values, call: Call, training: bool, why: str | None, kind: Any) -> Variant:
        conditions: list[str] = []
        around, unseen, as_recorded, self._unsure = False, None, False, None
        for variant in self:
            if variant.form != form:
                continue
            changed = variant.changed_circumstance(values, training)
            condition = str(changed) if changed else variant.failed_condition(values, self._original, training)
            if condition is None and self.closed is None:
                unseen = self.compared.difference_on_first(variant, call, training, kind)
                if unseen is not None:
                    condition = f"calls on which it equals its graph; here {unseen}"
                    as_recorded = variant.recording.holds_again(self._original, training)
            if condition is None:
                return variant
            conditions.append(condition)
            around = around or changed is not None
        if unseen and as_recorded and form_of_call(form, values) in self._recorded:
            raise decided_by_values(self._original, unseen)
        refused = self.closed or no_more_recordings(self._original, 1 + len(self._others), self._config.run)
        cause = None
        if refused is None:
            words = f"has other arguments: {why.partition(': ')[0]}" if why else f"does not meet: {conditions[0]}"
            try:
                new = self._recorded_anew(form, call, training, kind, words)
                self._unsure = new if unseen else None
                self._recorded.add(form_of_call(form, new.recording.inputs))
                return new
            except FracTrainError as error:
                refused = f"It cannot be recorded again for this call: {error}" if why else refused_again(error)
                cause = error.with_traceback(None)
        if why is not None:
            raise InputError(f"{why}. {refused}") from cause
        recording = next(variant.recording for variant in self if variant.form == form)
        first = recording.fixed_batch and not self._config.run.batch_axis
        if first and (parts := sequence_first_parts(self._original)):
            refused += f". {parts[0]} takes sequence-first inputs: if dimension 1 has the samples, set run.batch_axis=1"
        differences = differences_in_words(recording, values) or other_differences(values, around=around)
        raise InputError(
            f"this call differs from the recorded one: {differences}. {type(self._original).__name__} was recorded for "
            f"{conditions[0]}. {refused}"
        ) from cause

    def _note_conditions(self, form: int, recording: Recording) -> None:
        """Note the circumstances, and the inputs whose values, decide which recording fits."""
        if self._watched.add(recording):
            self._forget_choices()
        indices = {guard.index for guards in recording.guards.values() for guard in guards.values}
        if indices - self._fixed.get(form, set()):
            self._fixed[form] = self._fixed.get(form, set()) | indices
            self._forget_choices()

    def _recorded_anew(
        self, form: int, call: Call, training: bool, kind: Any, difference: str, *, joined: bool = False
    ) -> Variant:
        """A recording that equals the model on a call, which has some ``difference`` from the calls of the others.

        ``joined``: arguments that are one tensor stay one, because the model may ask which are the same.
        """
        recordings, forms = len(self._others), len(self._forms)
        try:
            new = self._record(form, call, training, joined)
            if again := self.compared.difference_on_first(new, call, training, kind):
                raise InputError(f"the new recording differs from the model too: {again}")
            words = "%s is recorded again (%d of at most %d recordings), because this call %s"
            name, limit = type(self._original).__name__, self._config.run.recordings
            _LOG.warning(words, name, 1 + len(self._others), limit, difference)
            self.on_recorded(new.recording)
            return new
        except FracTrainError:
            del self._others[recordings:], self._forms[forms:]
            if joined or len({id(x) for x in tensors_in(call)}) == len(list(tensors_in(call))):
                raise
        return self._recorded_anew(form, call, training, kind, difference, joined=True)

    def _record(self, form: int, call: Call, training: bool, joined: bool) -> Variant:
        config, original = self._config, self._original
        forget_notices(original)
        around = Surroundings.present(training)
        with torch.inference_mode(False):
            recording = record(original, *call, batch_axis=config.run.batch_axis, surroundings=around, joined=joined)
            passes = default_passes(config) if self._passes is None else self._passes
            rewrite_graphs(original, recording, passes, self.first.recording)
        share_inserted(self.first.recording, recording)
        variant = self._variant(recording, form, f"dispatched_{len(self._others) + 1}")
        if changed := variant.changed_circumstance(recording.call.bind(*call), training):
            raise InputError(f"a recording can only be made for {changed}: make the call so")
        self._others.append(variant)
        if form == len(self._forms):
            self._forms.append(recording.call)
        self._note_conditions(form, recording)
        self.train(training)
        return variant

    def _variant(self, recording: Recording, form: int, place: str = "dispatched") -> Variant:
        pairs = zip(recording.graphs, (place, f"{place}_in_evaluation"), strict=False)
        copies = [Running(shown, self._config, self._tuner, path, recording.leaves) for shown, path in pairs]
        count, dimensions = SampleCount(recording, self._config.run.batch_axis), map(len, shapes_of(recording.inputs))
        running, reads = {True: copies[0], False: copies[-1]}, reads_of(recording, self._original)
        costs = costs_of(recording, self._config, count)
        return Variant(recording, running, form, count, costs, tuple(dimensions), reads)
