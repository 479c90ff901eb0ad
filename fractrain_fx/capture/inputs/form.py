"""The form of an argument: all of it that decides which recording fits a call, which leaves out values of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fractrain_fx.capture.compare import equal
from fractrain_fx.capture.trees import PLAIN, fields_of, items_of, version_of
from fractrain_fx.errors import InputError

__all__ = [
    "Kind",
    "Look",
    "attributes_of",
    "fits",
    "form_of",
    "kind_of",
    "look_of",
    "objects_of",
    "require_tensors",
    "shown_form",
]

_LONGEST = 200  # characters of a form in a message

# Objects that are what they are: their attributes change for other reasons than a call, or not at all.
_AS_THEY_ARE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, nn.Module, torch.Generator)


class Kind(Enum):
    """The kind of numbers in a tensor, on which code may branch. It stands for the tensor in a form."""

    FLOATS = "a tensor"
    COMPLEX = "a tensor of complex numbers"
    INTEGERS = "a tensor of integers"
    BOOLEANS = "a tensor of booleans"

    def __repr__(self) -> str:
        return str(self.value)


def kind_of(dtype: torch.dtype) -> Kind:
    """The kind of a type. A mask of booleans and one of floats mean different things, float16 and float32 do not."""
    if dtype.is_floating_point or dtype.is_complex:
        return Kind.FLOATS if dtype.is_floating_point else Kind.COMPLEX
    return Kind.BOOLEANS if dtype == torch.bool else Kind.INTEGERS


class Look(NamedTuple):
    """What Python code sees of the tensors of a call, besides their types, sizes, layouts and values.

    Attributes:
        kinds: for each tensor the first one that is the same object, its class, and the names of its attributes.
        attributes: the values of these attributes; of an object that is neither plain nor a tensor, its class.
    """

    kinds: tuple[Any, ...]
    attributes: tuple[Any, ...]


def look_of(tensors: Iterable[Tensor]) -> Look:
    """What Python code sees of the tensors of a call."""
    places: dict[int, int] = {}
    kinds, attributes = [], []
    for x in tensors:
        # A tensor made of other tensors (nested, packed) has these as attributes: others at each call.
        held = {} if is_traceable_wrapper_subclass(x) else vars(x)
        kinds.append((places.setdefault(id(x), len(places)), type(x), *held))
        attributes += [_seen(value) for value in held.values()]
    return Look(tuple(kinds), tuple(attributes))


def objects_of(tensors: Sequence[Tensor]) -> tuple[tuple[int, str], ...]:
    """For each tensor the first one that is the same object, and its class: what compiled code can ask, too."""
    return tuple([(next(i for i, other in enumerate(tensors) if other is x), type(x).__name__) for x in tensors])


def _seen(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    return (type(value), repr(value)) if isinstance(value, PLAIN) else type(value)


def form_of(value: Any, *, passed: bool = True) -> Any:
    """The form of an argument: containers are copied, and each tensor in them is replaced by its kind.

    An object that is neither a container nor a dataclass has itself in its form, and what its attributes hold now.
    Tensors of a default, which was not ``passed``, are constants of the graph: only they fit.
    """
    return _form(value, hidden=not passed, seen={})


def _form(value: Any, *, hidden: bool, seen: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        # A tensor in an object or a default is a constant of the graph.
        return _Held(value, version_of(value)) if hidden else kind_of(value.dtype)
    if isinstance(value, PLAIN):
        return value
    if id(value) in seen:
        return seen[id(value)]
    if type(value) in (list, tuple) or hasattr(type(value), "_fields"):
        parts = [_form(part, hidden=hidden, seen=seen) for part in value]
        return type(value)(*parts) if hasattr(type(value), "_fields") else type(value)(parts)
    if type(value) is dict:
        return {key: _form(part, hidden=hidden, seen=seen) for key, part in value.items()}
    if isinstance(value, slice):
        return slice(*(_form(part, hidden=hidden, seen=seen) for part in (value.start, value.stop, value.step)))
    if type(value) in (set, frozenset):
        return type(value)(value)
    items = items_of(value)
    form = seen[id(value)] = _Object(value, [] if items is not None else None, {})
    if items is not None and form.items is not None:
        form.items.extend((key, _form(part, hidden=hidden, seen=seen)) for key, part in items)
    form.attributes.update((name, _form(x, hidden=True, seen=seen)) for name, x in attributes_of(value))
    return form


def shown_form(form: Any) -> str:
    """A form on one line, its end left out if it is long."""
    words = " ".join(repr(form).split())
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST]}..."


@dataclass(frozen=True, eq=False)
class _Held:
    """A tensor in an object or a default, as it was."""

    tensor: Tensor
    version: int

    def __repr__(self) -> str:
        return "a tensor that is a constant of the graph"


@dataclass(frozen=True, eq=False)
class _Object:
    """A mapping, a list of another class, a dataclass, or any other object, as it was.

    ``items`` has keys and forms of its contents, ``None`` if it is not a container or dataclass; ``attributes`` has the
    forms of its other attributes.
    """

    holder: Any
    items: list[tuple[Any, Any]] | None
    attributes: dict[str, Any]

    def fits(self, value: Any, compared: set[tuple[int, int]]) -> bool:
        """Whether another object, or the same one now, is as this one was."""
        if type(value) is not type(self.holder):
            return False
        if (id(self), id(value)) in compared:  # objects may hold each other
            return True
        compared.add((id(self), id(value)))
        items = items_of(value)
        if items is None or self.items is None:
            if value is not self.holder and not equal(value, self.holder):
                return False
        else:
            if [key for key, _ in items] != [key for key, _ in self.items]:
                return False
            pairs = zip(self.items, items, strict=True)
            if not all(fits(form, part, compared) for (_, form), (_, part) in pairs):
                return False
        now = dict(attributes_of(value))
        return now.keys() == self.attributes.keys() and all(
            fits(x, now[name], compared) for name, x in self.attributes.items()
        )

    def __repr__(self) -> str:
        if self.items is None:
            return f"a {type(self.holder).__name__} object" if self.attributes else repr(self.holder)
        return f"{type(self.holder).__name__}({', '.join(f'{key}={form!r}' for key, form in self.items)})"


def fits(form: Any, value: Any, compared: set[tuple[int, int]] | None = None) -> bool:
    """Whether a value has a form. The order of keys counts, because code may read values in order."""
    if isinstance(value, Tensor):
        if isinstance(form, _Held):
            return value is form.tensor and version_of(value) == form.version
        return kind_of(value.dtype) is form
    if type(value) is type(form):
        if isinstance(value, (list, tuple)):
            return len(form) == len(value) and all(fits(a, b, compared) for a, b in zip(form, value, strict=True))
        if isinstance(value, dict):
            return list(form) == list(value) and all(fits(form[key], value[key], compared) for key in form)
        if isinstance(value, slice):
            pairs = ((form.start, value.start), (form.stop, value.stop), (form.step, value.step))
            return all(fits(a, b, compared) for a, b in pairs)
        return equal(form, value)
    return isinstance(form, _Object) and form.fits(value, set() if compared is None else compared)


def attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of an object's attributes; only the public plain ones of a container or a dataclass.

    Values that properties keep for later are left out.
    """
    if isinstance(value, _AS_THEY_ARE):
        return
    container = items_of(value) is not None
    fields = {name for name, _ in fields_of(value)}
    slots = (name for kind in type(value).__mro__ for name in _names(vars(kind).get("__slots__", ())))
    held = {name: getattr(value, name) for name in slots if hasattr(value, name) and not name.startswith("__")}
    for name, part in (held | getattr(value, "__dict__", {})).items():
        plain = isinstance(part, PLAIN) and not name.startswith("_") and name not in fields
        if plain if container else not isinstance(getattr(type(value), name, None), cached_property):
            yield name, part


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def require_tensors(name: str, value: Any) -> None:
    """Refuse arrays of numpy, which would be constants, and strided nested tensors, also inside containers."""
    if isinstance(value, Tensor) and value.is_nested and value.layout is torch.strided:
        raise InputError(
            f"argument {name!r} is a nested tensor of the strided layout, which has no sizes that code can read: "
            "make it with torch.nested.nested_tensor(..., layout=torch.jagged)"
        )
    if isinstance(value, np.ndarray):
        raise InputError(
            f"argument {name!r} holds an array of numpy, which a graph would keep as a constant: pass a tensor "
            "(torch.from_numpy), and give the model one in your own code too"
        )
    for _, part in () if isinstance(value, (Tensor, *PLAIN)) else items_of(value) or ():
        require_tensors(name, part)
