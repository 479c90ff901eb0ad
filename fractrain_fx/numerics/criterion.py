"""The loss of a batch by a function that the caller gives, and the arguments of the model's call beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fractrain_fx.errors import InputError

__all__ = ["Arguments", "Criterion", "arguments_of", "inputs_and_targets"]

Criterion = Callable[[Any, Any], Tensor]
"""The mean loss of a batch from the model's output and the batch's targets, such as ``F.cross_entropy``."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def inputs_and_targets(batch: Any) -> tuple[Arguments, Any]:
    """The arguments of the model's call on a batch ``(inputs, targets)``, and what a criterion gets as targets.

    ``inputs`` is a tensor, a tuple of arguments, or a mapping of keyword arguments.

    Raises:
        InputError: the batch is not a pair.
    """
    if not (isinstance(batch, tuple | list) and len(batch) > 1):
        raise InputError(
            f"with criterion= a batch must be (inputs, targets), not a {type(batch).__name__}: give pairs, or leave "
            "out criterion for a model that returns its loss"
        )
    return arguments_of(batch[0]), batch[1]


def arguments_of(inputs: Any) -> Arguments:
    """A tensor, a tuple of arguments or a mapping of keyword arguments, as the arguments of a call."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs,) if isinstance(inputs, Tensor) else tuple(inputs), {}
