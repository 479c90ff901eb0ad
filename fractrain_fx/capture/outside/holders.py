"""The modules and other objects of a model whose attributes are watched: settings, and objects of ordinary classes."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, nn

__all__ = ["holders", "replaced_method"]

_DEPTH = 3
_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE: Python refuses to set an attribute of such a class


def holders(model: nn.Module) -> dict[int, tuple[Any, str, str]]:
    """Modules, and objects that they hold, to a depth of three: by identity the object, its module's path, its name.

    The name is ``""`` for a module, and may have dots for an object inside an object.
    """
    found: dict[int, tuple[Any, str, str]] = {}
    for path, module in model.named_modules():
        found[id(module)] = module, path, ""
    level = list(found.values())
    for _ in range(_DEPTH):
        below = []
        for holder, path, held in level:
            for name, value in vars(holder).items():
                if id(value) not in found and _is_watched(value):
                    found[id(value)] = value, path, f"{held}.{name}".lstrip(".")
                    below.append(found[id(value)])
        level = below
    return found


@contextlib.contextmanager
def replaced_method(kind: type, name: str, made: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a special method of a class by ``made(method)``, inside; inherited methods are inherited again then."""
    own, real = name in vars(kind), getattr(kind, name)
    setattr(kind, name, made(real))
    try:
        yield
    finally:
        if own:
            setattr(kind, name, real)
        else:
            delattr(kind, name)


def _is_watched(value: Any) -> bool:
    kind = type(value)
    if isinstance(value, SimpleNamespace):
        return True
    if isinstance(value, type | nn.Module | Tensor | np.ndarray) or not isinstance(
        getattr(value, "__dict__", None), dict
    ):
        return False
    if any(each.__flags__ & _IMMUTABLE and "__getattribute__" in vars(each) for each in kind.__mro__[:-1]):
        return False  # such as a class derived from ``dict``
    return _is_settings(value) or (not callable(value) and not _is_of_python_or_torch(kind))


def _is_settings(value: Any) -> bool:
    """Whether an object is a bag of settings: a dataclass, a Hugging Face configuration, parsed arguments."""
    named = type(value).__name__.lower().endswith(("config", "args", "arguments"))
    return dataclasses.is_dataclass(value) or isinstance(value, Namespace) or (named and not callable(value))


def _is_of_python_or_torch(kind: type) -> bool:
    package = kind.__module__.partition(".")[0]
    return package in ("torch", "numpy") or (package in sys.stdlib_module_names and package != "__main__")
