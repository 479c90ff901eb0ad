"""Stand-ins for functions that would lose a symbolic size: ``range``, ``int``, those of ``math``, and memoized ones.

A symbolic size equals the plain number. A cache of results by size (``functools.lru_cache``) would therefore return the
result for the plain number: einops caches the shapes of its reshapes like that. Nor may a symbol of a recording stay in
a cache.
"""

from __future__ import annotations

import builtins
import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Union

import numpy as np
from torch import Tensor, nn

from fractrain_fx.capture.replaced import Replacement
from fractrain_fx.capture.sizes.symbolic import Symbol, has_symbols, number_of, observe, plain, seen
from fractrain_fx.capture.trees import ValueList, leaves_in

__all__ = ["files_of", "stand_in", "standins"]


class _StandsFor(type):
    """Metaclass of a class that makes the instances of another class and claims them as its own."""

    real: type[Any]
    make: Callable[..., Any]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.make(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.real)

    def __subclasscheck__(cls, subclass: type[Any]) -> bool:
        return issubclass(subclass, cls.real)

    def __getattr__(cls, name: str) -> Any:
        return getattr(type.__getattribute__(cls, "real"), name)

    def __or__(cls, other: Any) -> Any:
        return Union[cls.real, other]  # noqa: UP007 (the operator is what is defined here)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.real

    def __hash__(cls) -> int:
        return hash(cls.real)


def stand_in(real: type[Any], make: Callable[..., Any]) -> type[Any]:
    """A class that stands for ``real``, whose instances ``make`` makes."""
    return _StandsFor(real.__name__, (), {"real": real, "make": staticmethod(make)})


def _range(*args: Any) -> Any:
    """A range holds plain numbers, so Python sees its length or, with a symbolic start or step, each argument."""
    if not any(map(_is_symbol, args)):
        return _RANGE(*args)
    if len(args) == 1 or (len(args) == 2 and not _is_symbol(args[0])):
        ends = (0, *args)[-2:]
        observe(_range_length, ends, _range_length(*plain(ends)))
    else:
        for arg in args:
            seen(arg)
    return _RANGE(*plain(args))


_RANGE = range


def _range_length(start: int, stop: int) -> int:
    return len(_RANGE(start, stop))


_range_length.__name__ = "count"


def _is_symbol(value: Any) -> bool:
    return isinstance(value, Symbol)


def _conversion(real: type[Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], Tensor):
            args = (args[0].item(),)
        return number_of(real, args) if len(args) == 1 and _is_symbol(args[0]) else real(*args, **kwargs)

    return make


def _symbolic(real: Callable[..., Any]) -> Callable[..., Any]:
    """A function of numbers that gives symbols for symbols; for containers of symbols it sees plain numbers."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs or not any(map(_is_symbol, args)):
            for leaf in leaves_in((args, kwargs)):
                if isinstance(leaf, ValueList):
                    leaf.noticed(sys._getframe(1))
                seen(leaf)
            return real(*plain(args), **plain(kwargs))
        return number_of(real, args)

    return call


def _product(values: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``numpy.prod``, which would turn symbolic sizes into an array."""
    if args or kwargs or not (isinstance(values, (tuple, list)) and any(map(_is_symbol, values))):
        return _PROD(values, *args, **kwargs)
    return math.prod(values)


_PROD = np.prod
# Functions that Python computes by methods or operators of the numbers, which are symbolic already.
_OPERATORS = ("ceil", "floor", "trunc", "prod")
_MATH: Mapping[Any, Callable[..., Any]] = {
    real: _symbolic(real)
    for name, real in vars(math).items()
    if callable(real) and not name.startswith("_") and name not in _OPERATORS
}
_MEMO = functools._lru_cache_wrapper
# Packages whose caches hold nothing of a model, and the standard library.
_APART = frozenset({"torch", "triton", "sympy", "cuda", "numpy", "scipy", "fractrain_fx", *sys.stdlib_module_names})
# The number of names in each library's module, and which of them are memoized functions.
_LIBRARIES: dict[str, tuple[int, list[str]]] = {}
_NAMES = {"int": stand_in(int, _conversion(int)), "float": stand_in(float, _conversion(float))}


def standins(model: nn.Module) -> Iterator[Replacement]:
    """The functions and types to replace while ``model`` is recorded.

    ``int`` and ``float`` are only replaced in the files of the model's own classes, because Python itself and libraries
    compare types with them. In these files functions of ``math`` that were imported by name are replaced too.
    """
    yield builtins, "range", stand_in(range, _range)
    yield np, "prod", _product
    for real, symbolic in _MATH.items():
        yield math, real.__name__, symbolic
    for file in files_of(model):
        for name, value in list(vars(file).items()):
            if type(value) is type(math.sqrt) and value in _MATH:
                yield file, name, _MATH[value]
        for name, replacement in _NAMES.items():
            if name not in vars(file):
                yield file, name, replacement
    yield from _memoized(model)


def files_of(model: nn.Module) -> Iterable[Any]:
    """The Python modules that define the classes of a model's modules, without torch's."""
    names = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    own_names = (
        name for name in names if not name.startswith(("torch.", "fractrain_fx.")) and name not in ("torch", "builtins")
    )
    return [sys.modules[name] for name in sorted(own_names) if name in sys.modules]


def _memoized(model: nn.Module) -> Iterator[Replacement]:
    """The memoized functions that a forward of ``model`` may call.

    The search covers loaded Python modules, the classes of the model's modules, and these modules themselves.
    """
    parts = list(model.modules())
    kinds = {kind for kind in map(type, parts) for kind in kind.__mro__ if _may_hold_memos(kind.__module__)}
    own_names = {"__main__", *(kind.__module__ for kind in kinds)}
    for name, file in list(sys.modules.items()):
        if _may_hold_memos(name):
            yield from _bypasses(file, _memo_names(file) if name in own_names else _library_memos(name, file))
    for owner in (*kinds, *parts):
        yield from _bypasses(owner, _memo_names(owner))


def _bypasses(owner: Any, names: Iterable[str]) -> Iterator[Replacement]:
    for name in names:
        value = vars(owner).get(name)
        if isinstance(value, staticmethod) and _is_memo(value):
            yield owner, name, staticmethod(_bypassing(value.__func__))
        elif _is_memo(value):
            yield owner, name, _bypassing(value)


def _memo_names(owner: Any) -> list[str]:
    return [name for name, value in list(getattr(owner, "__dict__", {}).items()) if _is_memo(value)]


def _is_memo(value: Any) -> bool:
    return isinstance(value.__func__ if isinstance(value, staticmethod) else value, _MEMO)


def _library_memos(name: str, file: Any) -> list[str]:
    """The same for a library, whose names are read anew only if their number changed: a process has a million names."""
    count = len(getattr(file, "__dict__", ()))
    if name not in _LIBRARIES or _LIBRARIES[name][0] != count:
        _LIBRARIES[name] = count, _memo_names(file)
    return _LIBRARIES[name][1]


def _may_hold_memos(module_name: str) -> bool:
    return module_name == "__main__" or module_name.partition(".")[0] not in _APART


@functools.lru_cache(maxsize=4096)
def _bypassing(memo: Any) -> Callable[..., Any]:
    """A function that skips the cache for calls with a symbolic size, and uses it for all others."""

    @functools.wraps(memo)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (memo.__wrapped__ if has_symbols((args, kwargs)) else memo)(*args, **kwargs)

    for name in ("cache_info", "cache_clear", "cache_parameters"):
        setattr(call, name, getattr(memo, name))
    return call
