"""Find and change tensors in the containers that a call is given or returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fractrain_fx.capture.values import ValueList

__all__ = ["fields_of", "has_mask", "hides_tensor", "holds_tensor", "map_tree", "tensors_in"]


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
    """Names and values of a dataclass instance's fields; nothing for other objects."""
    if not isinstance(value, type):
        for name in getattr(value, "__dataclass_fields__", ()):
            yield name, getattr(value, name, None)


def map_tree(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply ``change`` to everything in ``value`` that is not a list, tuple, slice or plain dictionary."""
    if isinstance(value, (tuple, list)) and not isinstance(value, ValueList):
        parts = [map_tree(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, slice):
        return slice(*(map_tree(part, change) for part in (value.start, value.stop, value.step)))
    if type(value) is dict:
        return {key: map_tree(part, change) for key, part in value.items()}
    return change(value)


def has_mask(index: Any) -> bool:
    """Whether an index picks by a boolean mask, so that the result's size depends on values."""
    if isinstance(index, Tensor):
        return index.dtype in (torch.bool, torch.uint8) and index.ndim > 0
    if isinstance(index, ValueList):
        return False
    return isinstance(index, (tuple, list)) and any(map(has_mask, index))
