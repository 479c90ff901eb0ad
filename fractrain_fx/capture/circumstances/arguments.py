"""Notice that a forward changes containers or objects among its arguments, which a graph does not do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from fractrain_fx.capture.inputs.call import Example
from fractrain_fx.capture.inputs.form import attributes_of
from fractrain_fx.capture.source import in_words
from fractrain_fx.capture.trees import PLAIN, items_of
from fractrain_fx.errors import CaptureError

__all__ = ["Arguments"]

_IMMUTABLE = (Tensor, *PLAIN)
_Parts = dict[Any, Any]


class Arguments:
    """The contents of a call's containers and objects before a recorded run.

    Changes of the tensors themselves are part of the graph.
    """

    def __init__(self, call: Example) -> None:
        self._held: dict[int, tuple[str, Any, _Parts]] = {}
        for name, value in (*zip(call.spec.positional, call.args, strict=False), *call.kwargs.items()):
            self._hold(name, value)

    def _hold(self, name: str, value: Any) -> None:
        if isinstance(value, _IMMUTABLE) or id(value) in self._held:
            return
        parts = _parts(value)
        self._held[id(value)] = name, value, parts
        for part in parts.values():
            self._hold(name, part)

    def notes(self, model: nn.Module, output: Any) -> list[str]:
        """Warnings about changed arguments that the forward also returns, so that nothing is lost.

        Raises:
            CaptureError: the forward changed another argument.
        """
        returned = set(_inside(output))
        notes = []
        for name, value, before in self._held.values():
            now = _parts(value)
            keys = [key for key in {**before, **now} if not _same(before, now, key)]
            if not keys:
                continue
            told = f"its argument {name!r} ({type(value).__name__}) at {', '.join(repr(key) for key in keys[:3])}"
            if id(value) not in returned:
                raise CaptureError(
                    f"{in_words(model)} changes {told}, which a graph does not do. Return the new values "
                    "instead, or switch off the cache or list that it fills in the example inputs"
                )
            notes.append(f"forward changes {told}. The rewritten model only returns it: read it from there")
        return notes


def _parts(value: Any) -> _Parts:
    if isinstance(value, (set, frozenset)):
        return dict.fromkeys(value)
    return {**dict(items_of(value) or ()), **dict(attributes_of(value))}


def _same(before: _Parts, now: _Parts, key: Any) -> bool:
    if key not in before or key not in now:
        return False
    a, b = before[key], now[key]
    return a is b or (isinstance(a, PLAIN) and type(a) is type(b) and (a == b or a != a))


def _inside(value: Any) -> Iterator[int]:
    if not isinstance(value, _IMMUTABLE):
        yield id(value)
        for _, part in items_of(value) or ():
            yield from _inside(part)
