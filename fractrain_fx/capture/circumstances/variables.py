"""Find the variables outside of modules that a model's code names: of files, classes, functions and their closures."""

from __future__ import annotations

import dis
import inspect
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from enum import Enum, EnumMeta
from functools import cache, partial
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from fractrain_fx.capture.circumstances.access import ABSENT, COMPARED, Access, AttributePath
from fractrain_fx.capture.circumstances.holders import entries_of
from fractrain_fx.capture.compare import copied
from fractrain_fx.capture.source import PACKAGE, forward_of, is_foreign
from fractrain_fx.capture.trees import CONTAINERS, PLAIN

__all__ = ["variables"]

_DEPTH = 6  # look-ups from the code that made calls of torch; a call of a function counts as two
_SMALL = 64  # entries of a container that are searched
_DATA = 10_000  # entries of a container; a longer one is data
_IMPLICIT = frozenset({"__call__", "__getattr__", "__getitem__"})  # methods that code runs without naming them
_INTERNAL = frozenset({"torch", "numpy", PACKAGE, "logging", "random", "tqdm"})


def variables(model: nn.Module, codes: Mapping[CodeType, dict[str, Any]], watched: Collection[int]) -> Iterable[Access]:
    """The variables with plain values that the code of a recorded run names.

    They are variables of Python files, attributes of classes, functions, parameters and other objects, defaults of
    arguments, and variables of closures. The search goes on in objects and functions that the code names, which may
    call no function of torch.

    Args:
        model: the model.
        codes: the code that made calls, with its global variables.
        watched: identities of the objects whose attributes are watched already.
    """
    kinds = {part for module in model.modules() for part in type(module).__mro__ if _is_open(part)}
    codes = _with_methods(codes, kinds)
    named = frozenset(name for code in codes for name in code.co_names)
    search = _Search(named, watched)
    for code, names in codes.items():
        search.code(code, names, _DEPTH)
    for kind in kinds:
        forward = forward_of(kind)
        if getattr(forward, "__code__", None) in codes:
            search.function(forward, _DEPTH, kind.__name__)
        for member in vars(kind).values():
            member_code: Any = getattr(member, "__code__", None)
            if member_code in codes and not {"type", "__class__"}.isdisjoint(member_code.co_names):
                search.parts(kind, kind.__name__, member_code.co_names, 0)
    for path, module in model.named_modules():
        for name in named & vars(module).keys():
            search.value(f"{path}.{name}".lstrip("."), vars(module)[name], named, _DEPTH, held=True)
        for name, x in (*module._parameters.items(), *module._buffers.items()):
            for attribute, value in ({} if x is None else vars(x)).items():
                if attribute in named:
                    search.add(x, AttributePath(path, name, attribute), value, shared=False)
    return search.found.values()


def _with_methods(codes: Mapping[CodeType, dict[str, Any]], kinds: Iterable[type]) -> dict[CodeType, dict[str, Any]]:
    """Code and the methods of classes of modules that it names. A forward is only there if it made calls."""
    all_codes: dict[CodeType, dict[str, Any]] = {}
    new = dict(codes)
    while new:
        all_codes |= new
        named = {name for code in new for name in code.co_names} - {"forward", "__init__"}
        methods = (vars(kind).get(name) for kind in kinds for name in named)
        functions = (getattr(method, "fget", method) for method in methods)
        new = {
            function.__code__: function.__globals__
            for function in functions
            if isinstance(function, FunctionType) and function.__code__ not in all_codes
        }
    return all_codes


class _Search:
    """Goes from code to what it names. ``found`` has a variable once, by the identity of its holder and its name.

    Attributes of objects count if any code names them, those of files and classes if the code does that names these.
    """

    def __init__(self, named: frozenset[str], watched: Collection[int]) -> None:
        self.found: dict[tuple[int, str], Access] = {}
        self._named, self._watched = named, watched
        self._seen: dict[Any, set[str]] = defaultdict(set)  # the names that were looked up, by code or identity

    def code(self, code: CodeType, names: dict[str, Any], depth: int) -> None:
        """Search what code names in the file that it belongs to."""
        holder = sys.modules.get(str(names.get("__name__")))
        if code in self._seen or holder is None or vars(holder) is not names:
            return
        self._seen[code] = set()
        for name in _globals_of(code):
            if name in names:
                place, value, before = AttributePath(holder.__name__, "", name), names[name], len(self.found)
                self.add(holder, place, value)
                apart = isinstance(value, (type, FunctionType, ModuleType))
                self.value(str(place), value, code.co_names if apart else _named_with_helpers(code, names), depth)
                if len(self.found) > before and not isinstance(value, (*COMPARED, type, FunctionType, ModuleType)):
                    self.found[id(holder), name] = Access(holder, place, value, True, True)  # it may be replaced
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                self.code(inner, names, depth)

    def value(self, path: str, value: Any, named: Iterable[str], depth: int, held: bool = False) -> None:
        """Search a function, class, file, object or container at ``path``; ``held``: in an attribute of a module."""
        if depth <= 0 or not _is_open(value):
            return
        for key, part in _items(value):
            self.value(f"{path}[{key!r}]", part, named, depth - 1, held)
        if isinstance(value, partial):
            self.add(value, AttributePath(path, "", "keywords"), value.keywords, shared=not held)
        if isinstance(value, FunctionType):
            self.function(value, depth - 2, value.__name__)
        self.parts(value, path, named, depth - 1, held)

    def function(self, function: Any, depth: int, owner: str) -> None:
        """Search the closure of a function, its defaults and its code."""
        function = inspect.unwrap(function)
        if not isinstance(function, FunctionType) or function in self._seen:
            return
        self._seen[function] = set()
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if cell != CellType() and name != "__class__":  # which super() takes
                self.add(cell, AttributePath(owner, name, "cell_contents"), cell.cell_contents)
                self.value(f"{owner}.{name}", cell.cell_contents, function.__code__.co_names, depth)
        if any(isinstance(default, (list, dict, set)) for default in function.__defaults__ or ()):
            self.add(function, AttributePath(owner, "", "__defaults__"), function.__defaults__)
        self.code(function.__code__, function.__globals__, depth)

    def parts(self, owner: Any, path: str, named: Iterable[str], depth: int, held: bool = False) -> None:
        """Search the attributes of an object that code names, and the methods that it calls."""
        shows = isinstance(owner, (type, ModuleType))
        names = {*named, *_IMPLICIT, *(() if shows else self._named)} - self._seen[id(owner)]
        self._seen[id(owner)] |= names
        attributes = getattr(owner, "__dict__", {})
        attributes = attributes if isinstance(attributes, Mapping) else {}
        places = (attributes, *map(vars, owner.__mro__ if isinstance(owner, type) else type(owner).__mro__))
        for name in {name for place in places for name in names & place.keys()}:
            part = next(place[name] for place in places if name in place)
            if isinstance(part, MemberDescriptorType) and not isinstance(owner, type):
                part = getattr(owner, name, ABSENT)
            self.add(owner, AttributePath(path, "", name), part, shared=not held)
            method = part if name in attributes else getattr(part, "fget", part)
            if isinstance(method, FunctionType) and not isinstance(owner, ModuleType) and depth > 0:
                if _is_open(method):
                    self.function(method, depth - 1, method.__name__)
                if not shows:
                    self.parts(owner, path, method.__code__.co_names, depth - 1, held)
            elif name in attributes or not hasattr(type(part), "__get__"):
                self.value(f"{path}.{name}", part, named, depth, held)

    def add(self, holder: Any, place: AttributePath, value: Any, shared: bool = True) -> None:
        """Note a variable if its value is plain, or an attribute of a parameter."""
        if id(holder) in self._watched or (place.name.startswith("__") and place.name != "__defaults__"):
            return
        if isinstance(value, (*CONTAINERS, tuple)) and len(value) > _DATA:
            return
        if isinstance(value, (*COMPARED, Enum)) or isinstance(holder, Tensor):
            self.found.setdefault((id(holder), place.name), Access(holder, place, copied(value), True, shared))


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    """What a small container, a partial or a bound method holds, by key."""
    if isinstance(value, MethodType):
        return (("__self__", value.__self__), ("__func__", value.__func__))
    small = isinstance(value, (*CONTAINERS, tuple)) and len(value) <= _SMALL
    return entries_of(value) if small or isinstance(value, partial) else ()


@cache
def _globals_of(code: CodeType) -> tuple[str, ...]:
    """The global variables that code names; ``co_names`` has attributes too, such as ``size`` of ``x.size()``."""
    return tuple(dict.fromkeys(op.argval for op in dis.get_instructions(code) if op.opname.endswith("_GLOBAL")))


def _named_with_helpers(code: CodeType, names: Mapping[str, Any], depth: int = 2) -> set[str]:
    """The names in code and in the functions that it names, to which it may hand an object."""
    named = set(code.co_names)
    for name in _globals_of(code) if depth else ():
        helper = names.get(name)
        if isinstance(helper, FunctionType) and _is_open(helper):
            named |= _named_with_helpers(helper.__code__, helper.__globals__, depth - 1)
    return named


def _is_open(value: Any) -> bool:
    """Whether settings may lie in a value: it is neither plain nor an object of torch, numpy or this package.

    Nor is it a function, class or file of Python itself.
    """
    if isinstance(value, (*PLAIN, Enum, EnumMeta, nn.Module, Tensor, np.ndarray)):
        return False
    if isinstance(value, ModuleType):
        return not is_foreign(value.__name__)
    if isinstance(value, (type, FunctionType)):
        return not is_foreign(str(value.__module__))
    module = str(type(value).__module__)
    return module.partition(".")[0] not in _INTERNAL or module.startswith("torch.optim.")
