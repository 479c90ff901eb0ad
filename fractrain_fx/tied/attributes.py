"""Notice changes of attributes whose values decided what was recorded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import nn

from fractrain_fx.capture.outside.attributes import ABSENT, Place
from fractrain_fx.capture.outside.equality import copied, same
from fractrain_fx.capture.trees import PLAIN

__all__ = ["TiedAttributes"]

_SMALL = 64


@dataclass
class _Tie:
    holder: Any
    place: Place
    raw: Any
    value: Any
    told: bool = False


class TiedAttributes:
    """Holds the recorded value of each attribute, and reports each changed attribute once.

    Args:
        original: the model that was passed to ``fractrainify``.
        read: places of the attributes that the recording read.
    """

    def __init__(self, original: nn.Module, read: Iterable[Place]) -> None:
        self._ties: dict[Place, _Tie] = {}
        for place in read:
            holder: Any = original.get_submodule(place.module)
            holder = attrgetter(place.held)(holder) if place.held else holder
            value = copied(getattr(holder, place.name, ABSENT))
            self._ties[place] = _Tie(holder, place, vars(holder).get(place.name, ABSENT), value)

    def own(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """For each attribute its holder's dictionary, its name there and its value (``ABSENT``: not in there).

        The entries of an attribute that is a small dictionary follow.
        """
        for tie in self._ties.values():
            yield vars(tie.holder), tie.place.name, tie.raw
            if isinstance(tie.raw, dict) and not tie.told and len(tie.raw) <= _SMALL:
                yield from ((tie.raw, key, value) for key, value in tie.raw.items())

    def lists(self) -> list[list[Any]]:
        """The attributes that are small lists of plain values."""
        found = [tie.raw for tie in self._ties.values() if isinstance(tie.raw, list) and not tie.told]
        return [each for each in found if len(each) <= _SMALL and all(isinstance(part, PLAIN) for part in each)]

    def reads(self, name: str) -> bool:
        """Whether the recording read an attribute of the model itself."""
        return Place("", "", name) in self._ties

    def changes(self) -> list[str]:
        """The attributes whose value has changed since recording, in words; each is reported once."""
        found = []
        for tie in self._ties.values():
            now = getattr(tie.holder, tie.place.name, ABSENT)
            if not (tie.told or same(tie.value, now)):
                found.append(f"{tie.place} was {_told(tie.value)} when the model was recorded and is {_told(now)}")
                tie.told = True
            tie.raw = vars(tie.holder).get(tie.place.name, ABSENT)
        return found


def _told(value: Any) -> str:
    if value is ABSENT:
        return "not there"
    told = repr(value)
    return told if len(told) < 60 and "\n" not in told else f"another {type(value).__name__}"
