"""Sizes that remember where they came from: they behave as numbers and can be written as graph nodes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fractrain_fx.capture.values import ValueList

__all__ = ["SymbolicFloat", "SymbolicInt", "has_symbols", "plain", "symbolic_shape"]


class _Symbol:
    """What both kinds of number share: the operation and operands that gave the value.

    Arithmetic stays symbolic; comparisons, hashing, formatting and conversion see the concrete value.
    """

    op: Callable[..., Any]
    operands: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return (plain, (plain(self),))

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


class SymbolicInt(_Symbol, int):
    """An ``int`` read from the shape of a recorded tensor, or computed from such."""


class SymbolicFloat(_Symbol, float):
    """A ``float`` computed from a :class:`SymbolicInt`."""


def _symbol(value: Any, op: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
    if isinstance(value, tuple):
        whole = op, operands
        return tuple(_symbol(part, _item_of(whole, i), operands) for i, part in enumerate(value))
    kind = SymbolicInt if type(value) is int else SymbolicFloat if type(value) is float else None
    if kind is None:
        return value
    symbol = kind(value)
    symbol.op, symbol.operands = op, operands
    return symbol


def _item_of(whole: tuple[Callable[..., Any], tuple[Any, ...]], index: int) -> Callable[..., Any]:
    return (operator.floordiv, operator.mod)[index] if whole[0] is divmod else whole[0]


def _binary(op: Callable[..., Any], reflected: bool) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        operands = (other, self) if reflected else (self, other)
        return _symbol(op(*map(plain, operands)), op, operands)

    return method


def _unary(op: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        return _symbol(op(plain(self), *args), op, (self, *args))

    return method


def _install() -> None:
    import math

    binary: dict[str, Callable[..., Any]] = {
        "add": operator.add,
        "sub": operator.sub,
        "mul": operator.mul,
        "floordiv": operator.floordiv,
        "truediv": operator.truediv,
        "mod": operator.mod,
        "pow": operator.pow,
        "divmod": divmod,
    }
    unary: dict[str, Callable[..., Any]] = {
        "neg": operator.neg,
        "pos": operator.pos,
        "abs": operator.abs,
        "round": round,
        "ceil": math.ceil,
        "floor": math.floor,
    }
    for name, op in binary.items():
        setattr(_Symbol, f"__{name}__", _binary(op, reflected=False))
        setattr(_Symbol, f"__r{name}__", _binary(op, reflected=True))
    for name, op in unary.items():
        setattr(_Symbol, f"__{name}__", _unary(op))


_install()


def symbolic_shape(x: Tensor) -> torch.Size:
    """The shape of a recorded tensor, each size a symbol for ``x.size(dim)``."""
    sizes = []
    for dim, size in enumerate(x.shape):
        symbol = SymbolicInt(size)
        symbol.op, symbol.operands = torch.Tensor.size, (x, dim)
        sizes.append(symbol)
    return torch.Size(sizes)


def plain(value: Any) -> Any:
    """The same value with every symbol replaced by its number; containers are rebuilt only where one is inside."""
    if isinstance(value, SymbolicInt):
        return int.__int__(value)
    if isinstance(value, SymbolicFloat):
        return float.__float__(value)
    if isinstance(value, ValueList):
        return value.unread()
    if not has_symbols(value):
        return value
    if isinstance(value, torch.Size):
        return torch.Size(map(plain, value))
    if isinstance(value, tuple):
        parts = [plain(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [plain(part) for part in value]
    if isinstance(value, slice):
        return slice(plain(value.start), plain(value.stop), plain(value.step))
    return {key: plain(part) for key, part in value.items()}


def has_symbols(value: Any) -> bool:
    """Whether a symbol lies in ``value`` or in the plain containers that make it up."""
    if isinstance(value, (_Symbol, ValueList)):
        return True
    if isinstance(value, (tuple, list)):
        return any(map(has_symbols, value))
    if isinstance(value, slice):
        return has_symbols((value.start, value.stop, value.step))
    return type(value) is dict and any(map(has_symbols, value.values()))
