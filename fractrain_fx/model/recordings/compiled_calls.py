"""Choose the recording for a compiled call, whose sizes may be symbols, by plain values alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from fractrain_fx.capture import Form, forms_of
from fractrain_fx.capture.asked import settings_now
from fractrain_fx.capture.inputs.form import objects_of
from fractrain_fx.capture.trees import map_tensors, tensors_in
from fractrain_fx.errors import InputError
from fractrain_fx.model.recordings.variant import Variant

__all__ = ["CompiledCalls"]

T = TypeVar("T")


class CompiledCalls:
    """Remembers which recording each eager call got, because compiled code can neither compare nor record.

    Args:
        model: the model that was recorded.
        first: its first recording.
        variants: all recordings, the first one first; more may come.

    Attributes:
        by_attributes: whether attributes of input tensors decide which recording fits.
    """

    def __init__(self, model: nn.Module, first: Variant, variants: Iterable[Variant]) -> None:
        self._model, self._first, self._variants = model, first, variants
        self._objects = objects_of(list(tensors_in(first.recording.inputs)))
        self._known: dict[Any, Variant] = {}
        self._place_of = _run_by_compiler(self._place)
        self.by_attributes = False

    def clear(self) -> None:
        """Forget all eager calls."""
        self._known.clear()

    def note(self, form: int, values: Sequence[Any], training: bool, variant: Variant) -> None:
        """Remember the recording of an eager call."""
        objects = objects_of(list(tensors_in(values)))
        self._known[form, training, forms_of(values), objects, settings_now()] = variant

    def choose(
        self, form: int, values: tuple[Any, ...], training: bool, variants: tuple[Variant, ...], *, as_first: bool
    ) -> Variant:
        """The recording for a compiled call.

        Args:
            form: the number of the form of call.
            values: for the inputs of the graph.
            training: the mode.
            variants: all recordings, as a tuple, which compiled code can go through.
            as_first: whether the first one fits, whatever the sizes.

        Raises:
            InputError: no eager call tells which one fits.
        """
        if self.by_attributes:
            raise InputError(
                "torch.compile cannot compare attributes of input tensors, and this model reads some: run it in eager "
                "mode"
            )
        first, objects = self._first, objects_of(list(tensors_in(values)))
        if as_first and objects == self._objects and first.changed_circumstance(values, training) is None:
            return first  # its sizes may be symbols of the compiler
        fits = tuple(
            [variant.form == form and variant.changed_circumstance(values, training) is None for variant in variants]
        )
        place = self._place_of(form, training, forms_of(values), objects, fits) if values else -1
        if place < 0:
            raise InputError(
                "torch.compile meets arguments, sizes or circumstances for which the model was not recorded: call it "
                "once in eager mode on such a batch, which records it again if that is possible"
            )
        return variants[place]

    def _place(
        self, form: int, training: bool, forms: Sequence[Form], objects: Sequence[Any], fits: Sequence[bool]
    ) -> int:
        """The number of the recording that fits a form of call with tensors of certain forms; -1 if none does.

        ``fits``: for each recording, whether it has this form of call and fits the circumstances.
        """
        objects = tuple(map(tuple, objects))
        variants = list(self._variants)
        known = self._known.get((form, training, tuple(forms), objects, settings_now()))
        if known is not None:
            return variants.index(known)
        if objects != self._objects:
            return -1
        tensors = iter([torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in forms])
        recording = next(variant.recording for variant in variants if variant.form == form)
        values = map_tensors(list(recording.inputs), lambda _: next(tensors))
        for place, variant in enumerate(variants):
            if fits[place] and variant.failed_condition(values, self._model, training) is None:
                return place
        return -1


def _run_by_compiler(function: Callable[..., T]) -> Callable[..., T]:
    """The function with a mark: the compiler runs it once for each set of sizes, and takes the result as a constant.

    Only the arguments have to be plain values, and not what the function is bound to: torch 2.11 takes no others.
    """

    def run(*args: Any) -> T:
        return function(*args)

    # The same as ``torch.compiler.assume_constant_result``, which would import the compiler here.
    run._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return run
