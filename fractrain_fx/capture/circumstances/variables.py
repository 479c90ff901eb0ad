"""Find the variables outside of modules that a model's code names: of files, classes, functions and their closures."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from types import CellType, CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from fractrain_fx.capture.circumstances.access import ABSENT, COMPARED, Access, AttributePath
from fractrain_fx.capture.compare import copied
from fractrain_fx.capture.source import forward_of, is_foreign

__all__ = ["variables"]

_DEPTH = 3  # calls and look-ups from the code that made calls of torch


def variables(model: nn.Module, codes: Mapping[CodeType, dict[str, Any]], watched: Collection[int]) -> Iterable[Access]:
    """The variables with plain values that the code of a recorded run names.

    They are variables of Python files, attributes of classes, functions and other objects, defaults of arguments, and
    variables of closures. The search goes on in functions that the code names, which may call no function of torch.

    Args:
        model: the model.
        codes: the code that made calls, with its global variables.
        watched: identities of the objects whose attributes are watched already.
    """
    kinds = {part for module in model.modules() for part in type(module).__mro__ if _is_own(part)}
    codes, search = _with_methods(codes, kinds), _Search()
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
    named = {name for code in codes for name in code.co_names}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in named and id(value) not in watched:
                search.value(module, path, name, value, named, _DEPTH)
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
    """Goes from code to what it names. ``found`` has a variable once, by the identity of its holder and its name."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, str], Access] = {}
        self._seen: set[Any] = set()

    def code(self, code: CodeType, names: dict[str, Any], depth: int) -> None:
        """Search what code names in the file that it belongs to."""
        holder = sys.modules.get(str(names.get("__name__")))
        if code in self._seen or holder is None or vars(holder) is not names:
            return
        self._seen.add(code)
        for name in _globals_of(code):
            if name in names:
                self._add(holder, AttributePath(holder.__name__, "", name), names[name])
                self.value(holder, holder.__name__, name, names[name], code.co_names, depth)
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                self.code(inner, names, depth)

    def value(self, holder: Any, path: str, name: str, value: Any, named: Iterable[str], depth: int) -> None:
        """Search a function, class, file or object of a user's that ``holder`` has under ``name``."""
        if depth and _is_own(value):
            if isinstance(value, FunctionType):
                self.function(value, depth - 1, value.__name__)
            self.parts(value, f"{path}.{name}".lstrip("."), named, depth - 1, held=isinstance(holder, nn.Module))

    def function(self, function: Any, depth: int, owner: str) -> None:
        """Search the closure of a function, its defaults and its code."""
        function = inspect.unwrap(function)
        if not isinstance(function, FunctionType) or function in self._seen:
            return
        self._seen.add(function)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if cell != CellType() and name != "__class__":  # which super() takes
                self._add(cell, AttributePath(owner, name, "cell_contents"), cell.cell_contents)
                self.value(function, owner, name, cell.cell_contents, function.__code__.co_names, depth)
        if any(isinstance(default, (list, dict, set)) for default in function.__defaults__ or ()):
            self._add(function, AttributePath(owner, "", "__defaults__"), function.__defaults__)
        self.code(function.__code__, function.__globals__, depth)

    def parts(self, owner: Any, path: str, named: Iterable[str], depth: int, held: bool = False) -> None:
        """Search the attributes of an object that code names, and the methods that it calls."""
        attributes = getattr(owner, "__dict__", {})
        kinds = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
        for name in {*named, "__call__"}:
            part = attributes.get(name, next((vars(kind)[name] for kind in kinds if name in vars(kind)), ABSENT))
            if isinstance(part, MemberDescriptorType) and not isinstance(owner, type):
                part = getattr(owner, name, ABSENT)
            self._add(owner, AttributePath(path, "", name), part, shared=not held)
            if depth and isinstance(part, FunctionType) and _is_own(part):
                self.function(part, depth, part.__name__)
                if not isinstance(owner, (type, ModuleType)) and (id(owner), name) not in self._seen:
                    self._seen.add((id(owner), name))
                    self.parts(owner, path, part.__code__.co_names, depth - 1, held)
            elif isinstance(owner, ModuleType):
                self.value(owner, path, name, part, named, depth)

    def _add(self, holder: Any, place: AttributePath, value: Any, shared: bool = True) -> None:
        # A container of a derived class may be a registry, which grows when other models are made.
        if type(value) in COMPARED and (place.name == "__defaults__" or not place.name.startswith("__")):
            self.found.setdefault((id(holder), place.name), Access(holder, place, copied(value), True, shared))


@cache
def _globals_of(code: CodeType) -> tuple[str, ...]:
    """The global variables that code names; ``co_names`` has attributes too, such as ``size`` of ``x.size()``."""
    return tuple(dict.fromkeys(op.argval for op in dis.get_instructions(code) if op.opname.endswith("_GLOBAL")))


def _is_own(value: Any) -> bool:
    """Whether a function, class, file or object comes neither from Python nor from torch, numpy or this package."""
    if isinstance(value, (*COMPARED, nn.Module, Tensor, np.ndarray)):
        return False
    if isinstance(value, ModuleType):
        name = value.__name__
    else:
        name = str((value if isinstance(value, (type, FunctionType)) else type(value)).__module__)
    return not is_foreign(name)
