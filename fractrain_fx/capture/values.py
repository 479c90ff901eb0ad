"""Lists of values that a tensor held: they may be passed on and returned, but code that reads one is noticed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from torch.fx import Node

__all__ = ["ValueList"]

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
    ),
    *("append", "extend", "insert", "remove", "pop", "clear", "index", "count", "sort", "reverse", "copy"),
)


class ValueList(list[Any]):
    """The result of ``tolist()``. Models pass sizes of parts on, or return values for a log, without reading them.

    Args:
        items: the values.
        source: the node that reads them from a tensor.
        looked: is called with the code that is about to read the list.
    """

    def __init__(self, items: Iterable[Any], source: Node, looked: Callable[[FrameType], None]) -> None:
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
