"""The modules and other objects of a model whose attributes are watched: settings, and objects of ordinary classes."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections import deque
from collections.abc import Iterator
from functools import partial
from types import CellType, FunctionType, SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, nn

from fractrain_fx.capture.source import PACKAGE, forward_of, is_foreign

__all__ = ["entries_of", "holders", "parts_of"]

_DEPTH = 3  # containers, one in the other
_OBJECTS = 8  # objects, one in the other
_ENTRIES = 1000  # of a container; a longer one is data
_OF_TORCH = frozenset(vars(nn.Module()))  # the dictionaries that torch itself keeps on a module
_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE: Python refuses to set an attribute of such a class


def holders(model: nn.Module) -> dict[int, tuple[Any, str, str]]:
    """Modules, and objects that they hold, to a depth of eight: by identity the object, its module's path, its name.

    Objects may lie in containers, and in the closures of functions. The name is ``""`` for a module, and may have dots
    and indices for an object inside another one.
    """
    objects: dict[int, tuple[Any, str, str]] = {}
    for path, module in model.named_modules():
        objects[id(module)] = module, path, ""
    level = list(objects.values())
    for _ in range(_OBJECTS):
        below = []
        for holder, path, held in level:
            for name, value in _held_by(holder):
                if id(value) not in objects and _is_watched(value):
                    objects[id(value)] = value, path, f"{held}.{name}".lstrip(".")
                    below.append(objects[id(value)])
        level = below
    return objects


def _held_by(holder: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of all that an object holds in its attributes, and in the closure of its class's forward."""
    for name, value in list(vars(holder).items()):
        if not (isinstance(holder, nn.Module) and name in _OF_TORCH):
            yield from _inside(name, value, _DEPTH)
    if isinstance(holder, nn.Module):
        yield from _inside("forward", forward_of(type(holder)), 1)


def parts_of(value: Any) -> Iterator[Any]:
    """A value, and what lies in it, to a depth of three, if it is a container, a partial or a function."""
    return (part for _, part in _inside("", value, _DEPTH))


def entries_of(value: Any) -> list[tuple[Any, Any]]:
    """Keys and parts of a container or a partial; none of another value."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return list(enumerate(value))
    return [*enumerate((value.func, *value.args)), *value.keywords.items()] if isinstance(value, partial) else []


def _inside(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """A value, and what lies in it if it is a container, a partial or a function."""
    yield name, value
    parts = entries_of(value)
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        parts = [(key, cell.cell_contents) for key, cell in cells if cell != CellType()]
    for key, part in parts[:_ENTRIES] if depth else ():
        yield from _inside(f"{name}[{key!r}]", part, depth - 1)


def _is_watched(value: Any) -> bool:
    kind = type(value)
    if isinstance(value, SimpleNamespace):
        return True
    if isinstance(value, type | nn.Module | Tensor | np.ndarray) or not isinstance(
        getattr(value, "__dict__", None), dict
    ):
        return False
    if kind.__module__.startswith(f"{PACKAGE}."):
        return False  # such as what watches a rewritten model
    if any(base.__flags__ & _IMMUTABLE and "__getattribute__" in vars(base) for base in kind.__mro__[:-1]):
        return False  # such as a class derived from ``dict``
    return _is_settings(value) or (not callable(value) and not is_foreign(kind.__module__))


def _is_settings(value: Any) -> bool:
    """Whether an object is a bag of settings: a dataclass, a Hugging Face configuration, parsed arguments."""
    named = type(value).__name__.lower().endswith(("config", "args", "arguments"))
    return dataclasses.is_dataclass(value) or isinstance(value, Namespace) or (named and not callable(value))
