"""Refuse values of the wrong kind in a frozen dataclass of settings, with the kind that its annotation asks for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fractrain_fx.errors import ConfigError, near

__all__ = ["check_kinds", "known_keys", "made", "require_numbers", "require_sequence"]

T = TypeVar("T")

_WORDS: dict[type, str] = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}


def check_kinds(settings: Any, prefix: str = "") -> None:
    """Raise a ``ConfigError`` for a field whose value is not of its annotation's kind.

    Numbers, switches, text, words of a ``Literal`` and dataclasses are checked, also where ``None`` is possible. Fields
    of several kinds and lists are left to their own checks. Text such as ``1e-3`` becomes the number where a number
    belongs.

    Args:
        settings: a dataclass.
        prefix: goes before the names of its fields in messages.
    """
    for name, kind, optional in _fields(type(settings)):
        value = getattr(settings, name)
        if value is None and optional:
            continue
        if kind is float and isinstance(value, str):
            value = _read(value)
            object.__setattr__(settings, name, value)
        if get_origin(kind) is Literal:
            known = get_args(kind)
            if value not in known:
                offer = near(str(value), known)
                raise ConfigError(f"{prefix}{name}={value!r} is unknown: write one of {', '.join(known)}.{offer}")
            continue
        fits = isinstance(value, kind)
        if kind in (int, float):
            fits = isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
        if not fits:
            words = _WORDS.get(kind) or f"a {kind.__name__}, like {kind.__name__}({_example(value)})"
            raise ConfigError(f"{prefix}{name}={value!r} must be {words}{', or None' if optional else ''}")


def known_keys(cls: type, names: Iterable[Any]) -> None:
    """Raise a ``ConfigError`` for a name that is not a field of ``cls``; it offers near names."""
    known = [f.name for f in fields(cls)]
    for key in names:
        if key not in known:
            raise ConfigError(f"{cls.__name__} has no field {key!r}; it has {', '.join(known)}.{near(str(key), known)}")


def made(cls: type[T], values: Mapping[str, Any]) -> T:
    """A dataclass from the mapping that a saved configuration holds, after :func:`known_keys`."""
    known_keys(cls, values)
    return cls(**values)


def require_sequence(name: str, value: Any, example: str) -> None:
    """Raise a ``ConfigError`` for text, a mapping or a single value where a list belongs."""
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__"):
        raise ConfigError(f"{name}={value!r} must be a list: write {name}={example}")


def require_numbers(name: str, value: Any, example: str, *, whole: bool = False) -> None:
    """Raise a ``ConfigError`` for anything but a list of numbers, or of whole numbers."""
    require_sequence(name, value, example)
    kind = Integral if whole else Real
    if not all(isinstance(_read(number), kind) and not isinstance(number, bool) for number in value):
        raise ConfigError(f"{name}={value!r} must be {'whole ' if whole else ''}numbers: write {name}={example}")


def _read(value: Any) -> Any:
    """The number that text such as ``1e-3`` means, which YAML 1.1 reads as text because it has no point."""
    return float(value) if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value) else value


def _fields(settings: type) -> Iterator[tuple[str, Any, bool]]:
    """Name, kind and whether it may be ``None``, of each field to check."""
    names = {f.name for f in fields(settings)}
    for name, hint in get_type_hints(settings).items():
        choices = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        kinds = [choice for choice in choices if choice is not NoneType]
        if name not in names or len(kinds) != 1:
            continue
        if kinds[0] in _WORDS or is_dataclass(kinds[0]) or get_origin(kinds[0]) is Literal:
            yield name, kinds[0], len(choices) > 1


def _example(value: Any) -> str:
    return ", ".join(f"{key}={item!r}" for key, item in value.items()) if isinstance(value, Mapping) else "..."
