"""Find the tensor of a call that tells how many samples the call has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fractrain_fx.capture import Recording, batch_size
from fractrain_fx.capture.checking.check import Batching
from fractrain_fx.capture.trees import fields_of, tensors_in

__all__ = ["SampleCount"]


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
        found: Any = values
        for step in self._steps:
            found = getattr(found, step.key) if step.is_field else found[step.key]
        samples: int = found.shape[self._axis]
        return samples


def _steps_to(value: Any, axis: int, size: int | None) -> tuple[_Step, ...] | None:
    """The steps from ``value`` to its first tensor with ``size`` samples."""
    if isinstance(value, Tensor):
        return () if value.ndim > axis and value.shape[axis] == size else None
    if isinstance(value, Mapping):
        parts = [(_Step(key, False), part) for key, part in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(_Step(index, False), part) for index, part in enumerate(value)]
    else:
        parts = [(_Step(name, True), part) for name, part in fields_of(value)]
    for step, part in parts:
        rest = _steps_to(part, axis, size)
        if rest is not None:
            return (step, *rest)
    return None
