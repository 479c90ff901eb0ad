"""Lists of values that a tensor held: torch calls may take a whole list, but code that reads it is noticed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from torch import Tensor

__all__ = ["ValueList", "is_sizes"]

_LONGEST = 4096
_LOOKS = (
    *("__iter__", "__getitem__", "__len__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__contains__"),
    *(
        "__add__",
        "__iadd__",
        "__mul__",
        "__rmul__",
        "__imul__",
        "__reversed__",
        "__setitem__",
        "__delitem__",
        "__repr__",
    ),
    *("append", "extend", "insert", "remove", "pop", "clear", "index", "count", "sort", "reverse", "copy"),
)


class ValueList(list[Any]):
    """The result of ``tolist()``. Models pass sizes of parts on like this without reading them.

    Args:
        items: the values.
        source: the tensor that held them.
        looked: is called with the code that is about to read the list.
    """

    def __init__(self, items: Iterable[Any], source: Tensor, looked: Callable[[FrameType], None]) -> None:
        super().__init__(items)
        self.source = source
        self._looked = looked

    def unread(self) -> list[Any]:
        """The values, without calling ``looked``."""
        return list(list.__iter__(self))


def _noticed(name: str) -> Callable[..., Any]:
    real = getattr(list, name)

    def method(self: ValueList, *args: Any, **kwargs: Any) -> Any:
        self._looked(sys._getframe(1))
        return real(self, *args, **kwargs)

    return method


for _name in _LOOKS:
    setattr(ValueList, _name, _noticed(_name))


def is_sizes(x: Tensor) -> bool:
    """Whether a tensor may hold the sizes of parts: whole numbers in a row."""
    return x.ndim == 1 and x.numel() <= _LONGEST and not (x.is_floating_point() or x.is_complex())
