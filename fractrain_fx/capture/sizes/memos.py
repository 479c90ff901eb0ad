"""Results that a library keeps by size (``functools.lru_cache``), computed anew while a model is recorded.

A size that remembers its node equals the plain number. A cache therefore hands out what it computed for the plain one,
and the size is lost: einops keeps the shapes of its reshapes like that. The other way round, nothing that belongs to a
recording may stay in a cache.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from inspect import CO_VARARGS, CO_VARKEYWORDS
from typing import Any

from torch import nn

from fractrain_fx.capture.sizes.symbolic import has_symbols

__all__ = ["memoized_functions"]

_MEMO = functools._lru_cache_wrapper
# Their caches hold nothing of a model; the standard library's neither.
_APART = frozenset({"torch", "triton", "sympy", "cuda", "numpy", "scipy", "fractrain_fx", *sys.stdlib_module_names})

# For each loaded module, how many names it had when it was looked through, and those of memoized functions.
_known: dict[str, tuple[int, tuple[str, ...]]] = {}


def memoized_functions(model: nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """Owner, name and what to put in the place of each memoized function that a forward of ``model`` may call.

    Looked through are the names of loaded modules, the classes of the model's modules, and these themselves.
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
        found = tuple(name for name, value in list(names.items()) if isinstance(value, _MEMO) and _takes_any(value))
        _known[module_name] = len(names), found
    return tuple(name for name in found if isinstance(names.get(name), _MEMO))


def _takes_any(memo: Any) -> bool:
    """Whether a memoized function has parameters: hundreds that ask what is installed have none."""
    code = getattr(memo.__wrapped__, "__code__", None)
    return code is None or bool(
        code.co_argcount or code.co_kwonlyargcount or code.co_flags & (CO_VARARGS | CO_VARKEYWORDS)
    )


@functools.lru_cache(maxsize=4096)
def _stand_in(memo: Any) -> Callable[..., Any]:
    """The function behind a cache for calls that hold a symbolic size, and the cache for all others."""

    @functools.wraps(memo)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (memo.__wrapped__ if has_symbols((args, kwargs)) else memo)(*args, **kwargs)

    for name in ("cache_info", "cache_clear", "cache_parameters"):
        setattr(call, name, getattr(memo, name))
    return call
