"""Find and change tensors in the containers that a call is given or returns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fractrain_fx.capture.values import ValueList
from fractrain_fx.errors import InputError

__all__ = [
    "DISTRIBUTED",
    "PLAIN",
    "fields_of",
    "has_mask",
    "hides_tensor",
    "holds_tensor",
    "is_strided",
    "map_tensors",
    "map_tree",
    "tensors_in",
]

DISTRIBUTED = (torch.distributions.Distribution, torch.distributions.Transform)
"""Classes whose instances are made of tensors, and can be made again from others."""

PLAIN = (bool, int, float, complex, str, bytes, type(None))
"""Types of values that hold nothing and never change."""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors in lists, tuples, mappings, slices and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, ValueList):
        return
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, slice):
        yield from tensors_in((value.start, value.stop, value.step))
    else:
        for _, part in fields_of(value):
            yield from tensors_in(part)


def is_strided(x: Tensor) -> bool:
    """Whether a tensor has a number at each place, and is neither sparse nor nested."""
    return x.layout is torch.strided and not x.is_nested


def holds_tensor(value: Any) -> bool:
    """Whether any tensor lies in ``value``."""
    return next(tensors_in(value), None) is not None


def hides_tensor(value: Any) -> bool:
    """Whether a tensor lies in an attribute of an object that is neither a container nor a dataclass."""
    seen: set[int] = set()

    def hides(part: Any, hidden: bool) -> bool:
        if isinstance(part, Tensor):
            return hidden
        if id(part) in seen or isinstance(part, (int, float, type, ModuleType, FunctionType, nn.Module)):
            return False
        seen.add(id(part))
        if isinstance(part, Mapping):
            return any(hides(each, hidden) for each in part.values())
        if isinstance(part, (tuple, list)):
            return any(hides(each, hidden) for each in part)
        known = dict(fields_of(part))
        return any(hides(each, hidden or name not in known) for name, each in getattr(part, "__dict__", {}).items())

    return hides(value, hidden=False)


def fields_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of the fields of a dataclass instance or distribution; nothing for other objects."""
    if isinstance(value, DISTRIBUTED):
        yield from vars(value).items()
    elif not isinstance(value, type):
        for name in getattr(value, "__dataclass_fields__", ()):
            yield name, getattr(value, name, None)


def map_tree(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply ``change`` to everything in ``value`` that is not a list, tuple, slice or plain dictionary."""
    if isinstance(value, (tuple, list)) and not isinstance(value, ValueList):
        parts = [map_tree(part, change) for part in value]
        if isinstance(value, torch.Size) and not all(isinstance(part, int) for part in parts):
            return tuple(parts)
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, slice):
        return slice(*(map_tree(part, change) for part in (value.start, value.stop, value.step)))
    if type(value) is dict:
        return {key: map_tree(part, change) for key, part in value.items()}
    return change(value)


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """A copy of ``value`` and the containers and dataclasses in it, with ``change`` applied to their tensors.

    Raises:
        InputError: a container of tensors cannot be copied.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, ValueList):
        return value
    if type(value) in (list, tuple, dict, slice) or hasattr(value, "_fields"):
        return map_tree(value, lambda part: map_tensors(part, change))
    if type(value) is set:
        return set(value)
    if isinstance(value, Mapping):
        parts = [(key, value[key]) for key in value]
    else:
        parts = list(enumerate(value)) if isinstance(value, (list, tuple)) else list(fields_of(value))
    changed = [(key, new) for key, part in parts if (new := map_tensors(part, change)) is not part]
    if not changed and not isinstance(value, MutableMapping):
        return value
    try:
        copied = copy.copy(value)
        for key, part in changed:
            if isinstance(value, (Mapping, list, tuple)):
                copied[key] = part
            else:
                object.__setattr__(copied, key, part)
    except Exception as error:  # a class may refuse this in any way
        raise InputError(
            f"a {type(value).__name__} among the arguments cannot be copied with other tensors ({error}): pass its "
            "tensors in a dictionary, a list, a tuple or a dataclass, or as arguments of their own"
        ) from error
    return copied


def has_mask(index: Any) -> bool:
    """Whether an index picks by a boolean mask, so that the result's size depends on values."""
    if isinstance(index, Tensor):
        return index.dtype in (torch.bool, torch.uint8) and index.ndim > 0
    if isinstance(index, ValueList):
        return False
    return isinstance(index, (tuple, list)) and any(map(has_mask, index))
