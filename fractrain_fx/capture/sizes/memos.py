"""Bypass caches of results by size (``functools.lru_cache``) while a model is recorded.

A symbolic size equals the plain number. A cache would therefore return the result for the plain number, and the symbol
would be lost: einops caches the shapes of its reshapes like that. Nor may a symbol of a recording stay in a cache.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from fractrain_fx.capture.sizes.symbolic import has_symbols

__all__ = ["memoized_functions"]

_MEMO = functools._lru_cache_wrapper
# Packages whose caches hold nothing of a model, and the standard library.
_APART = frozenset({"torch", "triton", "sympy", "cuda", "numpy", "scipy", "fractrain_fx", *sys.stdlib_module_names})

# For each loaded module, its number of names when it was searched, and the names of its memoized functions.
_known: dict[str, tuple[int, tuple[str, ...]]] = {}


def memoized_functions(model: nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """Owner, name and replacement of each memoized function that a forward of ``model`` may call.

    The search covers loaded Python modules, the classes of the model's modules, and these modules themselves.
    """
    for module_name, module in list(sys.modules.items()):
        if _is_searched(module_name):
            names = getattr(module, "__dict__", {})
            for name in _memoized(module_name, names):
                yield module, name, _stand_in(names[name])
    parts = list(model.modules())
    kinds = {kind for kind in map(type, parts) for kind in kind.__mro__ if _is_searched(kind.__module__)}
    for owner in (*kinds, *parts):
        for name, value in list(vars(owner).items()):
            if isinstance(value, _MEMO):
                yield owner, name, _stand_in(value)
            elif isinstance(value, staticmethod) and isinstance(value.__func__, _MEMO):
                yield owner, name, staticmethod(_stand_in(value.__func__))


def _is_searched(module_name: str) -> bool:
    return module_name == "__main__" or module_name.partition(".")[0] not in _APART


def _memoized(module_name: str, names: Mapping[str, Any]) -> tuple[str, ...]:
    count, found = _known.get(module_name, (-1, ()))
    if count != len(names) or module_name == "__main__":  # a cell of a notebook may define a function again
        found = tuple(name for name, value in list(names.items()) if isinstance(value, _MEMO))
        _known[module_name] = len(names), found
    return tuple(name for name in found if isinstance(names.get(name), _MEMO))


@functools.lru_cache(maxsize=4096)
def _stand_in(memo: Any) -> Callable[..., Any]:
    """A function that skips the cache for calls with a symbolic size, and uses it for all others."""

    @functools.wraps(memo)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (memo.__wrapped__ if has_symbols((args, kwargs)) else memo)(*args, **kwargs)

    for name in ("cache_info", "cache_clear", "cache_parameters"):
        setattr(call, name, getattr(memo, name))
    return call
