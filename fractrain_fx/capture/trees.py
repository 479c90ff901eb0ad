"""Find and change tensors in the containers that a call is given or returns."""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from types import FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.immutable_collections import immutable_dict, immutable_list

from fractrain_fx.errors import InputError

__all__ = [
    "CONTAINERS",
    "DISTRIBUTED",
    "PLAIN",
    "ValueList",
    "fields_of",
    "has_mask",
    "hides_tensor",
    "holds_tensor",
    "is_strided",
    "items_of",
    "leaves_in",
    "map_copies",
    "map_tensors",
    "map_tree",
    "tensors_in",
    "version_of",
]

DISTRIBUTED = (torch.distributions.Distribution, torch.distributions.Transform)
"""Classes whose instances are made of tensors, and can be made again from others."""

CONTAINERS = (list, dict, set, deque)
"""Types of containers that code can fill."""

PLAIN = (bool, int, float, complex, str, bytes, type(None))
"""Types of values that hold nothing and never change."""

_DICTIONARIES = (dict, immutable_dict)


# Names of a list that read none of its values, and its text.
_SILENT = {"__class_getitem__", "__doc__", "__getattribute__", "__hash__", "__init__", "__new__"}
_SILENT |= {"__repr__", "__sizeof__"}


class ValueList(list[Any]):
    """The result of ``tolist()``. Models pass sizes of parts on, or return values for a log, without reading them.

    ``source`` reads the values from a tensor, ``noticed`` is called with code that is about to read the list, and
    ``written`` gives the list's text for code that asks for it.
    """

    def __init__(
        self,
        items: Iterable[Any],
        source: Node,
        noticed: Callable[[FrameType], None],
        written: Callable[[list[Any], FrameType], str],
    ) -> None:
        super().__init__(items)
        self.source = source
        self.noticed = noticed
        self.written = written

    def unread(self) -> list[Any]:
        """The values, without calling ``noticed``."""
        return list(list.__iter__(self))

    def __repr__(self) -> str:
        return self.written(self.unread(), sys._getframe(1))

    def __radd__(self, other: Any) -> Any:
        """The sum with a list on the left, which would copy the values in C."""
        self.noticed(sys._getframe(1))
        return other + self.unread()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """An array of numpy, which would copy the values in C."""
        self.noticed(sys._getframe(1))
        return np.array(self.unread(), *args, **kwargs)


def _noticed(name: str) -> Callable[..., Any]:
    real = getattr(list, name)

    def method(self: ValueList, *args: Any, **kwargs: Any) -> Any:
        self.noticed(sys._getframe(1))
        return real(self, *args, **kwargs)

    return method


for _name in vars(list).keys() - _SILENT:
    setattr(ValueList, _name, _noticed(_name))


def items_of(value: Any) -> list[tuple[Any, Any]] | None:
    """Keys and parts of a container or the fields of a dataclass; ``None`` for other objects."""
    if isinstance(value, (*PLAIN, ValueList)):
        return None
    if isinstance(value, Mapping):
        return [(key, value[key]) for key in value]
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    return list(fields_of(value)) or None


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors in lists, tuples, mappings, slices and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, slice):
        yield from tensors_in((value.start, value.stop, value.step))
    else:
        for _, part in items_of(value) or ():
            yield from tensors_in(part)


def is_strided(x: Tensor) -> bool:
    """Whether a tensor has a number at each place, and is neither sparse nor nested."""
    return x.layout is torch.strided and not x.is_nested


def version_of(x: Tensor) -> int:
    """The number of changes of a tensor so far."""
    # An inference tensor has no version, and cannot be changed outside inference mode.
    return 0 if x.is_inference() else x._version


def holds_tensor(value: Any) -> bool:
    """Whether any tensor lies in ``value``."""
    return next(tensors_in(value), None) is not None


def hides_tensor(value: Any) -> bool:
    """Whether a tensor lies in an attribute of an object that is neither a container nor a dataclass."""
    visited: set[int] = set()

    def hides(part: Any, hidden: bool) -> bool:
        if isinstance(part, Tensor):
            return hidden
        if id(part) in visited or isinstance(part, (int, float, type, ModuleType, FunctionType, nn.Module)):
            return False
        visited.add(id(part))
        known = dict(items_of(part) or ())
        if isinstance(part, (Mapping, tuple, list)):
            return any(hides(item, hidden) for item in known.values())
        return any(hides(item, hidden or name not in known) for name, item in getattr(part, "__dict__", {}).items())

    return hides(value, hidden=False)


def fields_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of the fields of a dataclass instance or distribution; nothing for other objects."""
    if isinstance(value, DISTRIBUTED):
        yield from vars(value).items()
    elif not isinstance(value, type):
        for name in getattr(type(value), "__dataclass_fields__", ()):
            yield name, getattr(value, name, None)


def leaves_in(value: Any) -> Iterator[Any]:
    """Everything in ``value`` that is not a list, tuple, slice or plain dictionary, in order."""
    if isinstance(value, (tuple, list)) and not isinstance(value, ValueList):
        for part in value:
            yield from leaves_in(part)
    elif isinstance(value, slice):
        yield from leaves_in((value.start, value.stop, value.step))
    elif type(value) in _DICTIONARIES:
        yield from leaves_in(list(value.values()))
    else:
        yield value


def map_tree(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply ``change`` to everything in ``value`` that is not a list, tuple, slice or plain dictionary.

    Immutable containers of ``torch.fx`` become plain ones.
    """
    if isinstance(value, (tuple, list)) and not isinstance(value, ValueList):
        parts = [map_tree(part, change) for part in value]
        if isinstance(value, torch.Size) and not all(isinstance(part, int) for part in parts):
            return tuple(parts)
        kind = list if type(value) is immutable_list else type(value)
        return kind(*parts) if hasattr(type(value), "_fields") else kind(parts)
    if isinstance(value, slice):
        return slice(*(map_tree(part, change) for part in (value.start, value.stop, value.step)))
    if type(value) in _DICTIONARIES:
        return {key: map_tree(part, change) for key, part in value.items()}
    return change(value)


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """A copy of ``value`` and the containers and dataclasses in it, with ``change`` applied to their tensors."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (list, tuple, dict, slice) or hasattr(type(value), "_fields"):
        return map_tree(value, lambda part: map_tensors(part, change))
    if type(value) is set:
        return set(value)
    changed = [(key, new) for key, part in items_of(value) or () if (new := map_tensors(part, change)) is not part]
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


def map_copies(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same for a ``change`` that copies: one tensor has one copy, with the attributes that Python code gave it."""
    copies: dict[int, tuple[Tensor, Tensor]] = {}

    def copied(x: Tensor) -> Tensor:
        if id(x) not in copies:
            copies[id(x)] = x, change(x)
            for name, attribute in vars(x).items():
                vars(copies[id(x)][1]).setdefault(name, attribute)  # a subclass may have made its own
        return copies[id(x)][1]

    return map_tensors(value, copied)


def has_mask(index: Any) -> bool:
    """Whether an index picks by a boolean mask, so that the result's size depends on values."""
    masks = (x for x in leaves_in(index) if isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8))
    return any(x.ndim for x in masks)
