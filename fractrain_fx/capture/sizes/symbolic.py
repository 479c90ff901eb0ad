"""Sizes that remember where they came from: they behave as numbers and can be written as graph nodes.

Arithmetic on them stays symbolic. When one becomes a plain value (a comparison, ``bool()``, a key of a dictionary), an
observer gets the value that Python saw: a graph of this run only holds for calls in which Python would see the same.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fractrain_fx.capture.trees import ValueList, leaves_in, map_tree

__all__ = [
    "READS",
    "Observer",
    "Symbol",
    "SymbolicFloat",
    "SymbolicInt",
    "has_symbols",
    "number_of",
    "observe",
    "observed",
    "plain",
    "seen",
    "spoofed",
    "spoofed_tensor",
    "symbol",
    "symbolic_shape",
    "value_of",
]

READS: dict[Callable[..., Any], str] = {torch.Tensor.size: "size", torch.Tensor.stride: "stride"}
"""Methods that read a number from a tensor's form, with the method names that nodes use."""


def value_of(node: Any) -> Any:
    """The operation of a number that ``item()`` read from a tensor; its operand is the node that reads it again."""
    return node


Observer = Callable[[Callable[..., Any], tuple[Any, ...], Any], None]
"""Gets an operation, its operands (numbers and symbols) and the plain result that Python saw."""

_observer: Observer | None = None


@contextlib.contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Tell ``observer`` inside whenever a symbol becomes a plain value."""
    global _observer
    before, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = before


def observe(op: Callable[..., Any], operands: tuple[Any, ...], value: Any) -> Any:
    """Tell the observer that Python sees ``value``, the result of an operation on symbols; returns ``value``."""
    if _observer is not None:
        _observer(op, operands, value)
    return value


class Symbol:
    """A number with the operation and the operands that gave it."""

    def __init__(self, value: Any = 0) -> None:
        self.op: Callable[..., Any] = operator.pos
        self.operands: tuple[Any, ...] = (value,)

    def __reduce__(self) -> tuple[Any, ...]:
        return (plain, (plain(self),))

    def __bool__(self) -> bool:
        return bool(observe(bool, (self,), bool(plain(self))))

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if method == "__call__" and not options and all(isinstance(x, (int, float, np.number)) for x in inputs):
            return number_of(_of_numpy(ufunc), tuple(x.item() if isinstance(x, np.generic) else x for x in inputs))
        return getattr(ufunc, method)(*map(seen, inputs), **options)


class SymbolicInt(Symbol, int):
    """An ``int`` read from the shape of a recorded tensor, or computed from such numbers."""


class SymbolicFloat(Symbol, float):
    """A ``float`` computed from a :class:`SymbolicInt`."""


def number_of(op: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
    """Apply an operation to numbers and symbols; the result is a symbol, or observed if it is not a number."""
    value = op(*map(plain, operands))
    if isinstance(value, tuple) and op is divmod:
        return symbol(value[0], operator.floordiv, operands), symbol(value[1], operator.mod, operands)
    result = symbol(value, op, operands)
    return result if isinstance(result, Symbol) else observe(op, operands, value)


def spoofed(value: Any) -> Any:
    """Another number than ``value``, or a list of other numbers, to see what Python code does with it.

    The end of a slice is cut at the end of a tensor, so whole numbers become smaller.
    """
    if isinstance(value, list):
        return [spoofed(part) for part in value]
    if type(value) is _INT:
        return value - 1 if value > 1 else value + 1
    return 0.5 * value if type(value) is _FLOAT and value and abs(value) < _LARGE else 0.25


def spoofed_tensor(x: Tensor) -> Tensor:
    """A tensor of the form of ``x`` with other values, whose text is another one and longer."""
    if x.dtype == torch.bool:
        return ~x
    return 1000 * (x.nan_to_num() if x.is_floating_point() else x) + 1000


def symbol(value: Any, op: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
    """A number as a symbol with the operation that gave it. Other values, booleans among them, stay as they are."""
    kind = SymbolicInt if type(value) is _INT else SymbolicFloat if type(value) is _FLOAT else None
    if kind is None:
        return value
    symbolic = kind(value)
    symbolic.op, symbolic.operands = op, operands
    return symbolic


@cache
def _of_numpy(ufunc: Any) -> Callable[..., Any]:
    def call(*numbers: Any) -> Any:
        return ufunc(*numbers).item()

    call.__name__ = call.__qualname__ = f"numpy_{ufunc.__name__}"
    return call


def seen(value: Any) -> Any:
    """The value without its symbol, which Python code sees."""
    return observe(operator.pos, (value,), plain(value)) if isinstance(value, Symbol) else value


# The types themselves: while a model is recorded, files may see stand-ins under their names.
_INT, _FLOAT = int, float
_LARGE = 1e300


def _binary(op: Callable[..., Any], reflected: bool) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        if isinstance(other, np.generic):
            other = other.item()
        if not isinstance(other, (int, float)):
            if not isinstance(other, Tensor):
                seen(self)  # repeating a list, or a complex number
            return NotImplemented
        return number_of(op, (other, self) if reflected else (self, other))

    return method


def _unary(op: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        return number_of(op, (self, *args))

    return method


def _compared(op: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float, np.number)):
            return NotImplemented
        return observe(op, (self, other), op(plain(self), plain(other)))

    return method


def _converted(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        return getattr(seen(self), name)(*args)

    return method


def _install() -> None:
    binary = ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "lshift", "rshift", "and", "or", "xor")
    unary = ("neg", "pos", "abs", "invert")
    named: dict[str, Callable[..., Any]] = {name: getattr(operator, f"__{name}__") for name in (*binary, *unary)}
    named |= {"divmod": divmod, "round": round, "ceil": math.ceil, "floor": math.floor}
    for name in (*binary, "divmod"):
        setattr(Symbol, f"__{name}__", _binary(named[name], reflected=False))
        setattr(Symbol, f"__r{name}__", _binary(named[name], reflected=True))
    for name in (*unary, "round", "ceil", "floor"):
        setattr(Symbol, f"__{name}__", _unary(named[name]))
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Symbol, f"__{name}__", _compared(getattr(operator, name)))
    # Conversion to text is not observed: messages are made whether or not anything is wrong.
    for name in ("int", "float", "index", "trunc", "complex", "hash"):
        setattr(Symbol, f"__{name}__", _converted(f"__{name}__"))
    for name in ("bit_length", "bit_count", "is_integer", "as_integer_ratio", "to_bytes", "hex"):
        setattr(Symbol, name, _converted(name))


_install()


def symbolic_shape(x: Tensor, read: Callable[..., Any] = torch.Tensor.size) -> torch.Size:
    """The shape of a recorded tensor (or its strides), each number a symbol for ``x.size(dim)``."""
    return torch.Size([symbol(read(x, dim), read, (x, dim)) for dim in range(x.ndim)])


def plain(value: Any) -> Any:
    """The same value with every symbol replaced by its number; containers without a symbol are not rebuilt."""
    return map_tree(value, _number) if has_symbols(value) else value


def _number(value: Any) -> Any:
    if isinstance(value, SymbolicInt):
        return int.__int__(value)
    if isinstance(value, SymbolicFloat):
        return float.__float__(value)
    return value.unread() if isinstance(value, ValueList) else value


def has_symbols(value: Any) -> bool:
    """Whether a symbol lies in ``value`` or in the plain containers that make it up."""
    return any(isinstance(leaf, (Symbol, ValueList)) for leaf in leaves_in(value))
