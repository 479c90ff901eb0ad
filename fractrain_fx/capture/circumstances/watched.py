"""An attribute or variable that a recording read, and whether its value has changed since."""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import replace
from types import MemberDescriptorType
from typing import Any

from torch import Tensor

from fractrain_fx.capture.circumstances.access import ABSENT, Access
from fractrain_fx.capture.compare import copied, same, without_defaults
from fractrain_fx.capture.trees import PLAIN

__all__ = ["WatchedAttribute"]


class WatchedAttribute:
    """An attribute that the recording read.

    ``names`` is the dictionary in which it lies, empty for a variable of a closure, a slot and an attribute of a class;
    ``raw`` is its value there at the last comparison, ``value`` a copy of its value when it was recorded. ``owner`` has
    it if ``names`` does not: the class of an object, or what holds it.
    """

    def __init__(self, access: Access) -> None:
        self.access = access
        holder = access.holder
        names = getattr(holder, "__dict__", None)
        self.names: dict[str, Any] = names if isinstance(names, dict) else {}
        slotted = isinstance(getattr(type(holder), access.place.name, None), MemberDescriptorType)
        self.owner = type(holder) if isinstance(names, dict) and not slotted else holder
        self.look()
        self.value = self.kept()
        self.reported = False

    def __deepcopy__(self, memo: dict[int, Any]) -> WatchedAttribute:
        """The attribute of a copy of the model."""
        holder, value = self.access.holder, self.value
        if not self.access.shared:
            holder, value = copy.deepcopy(holder, memo), _in_copy(value, memo)
        duplicate = WatchedAttribute(replace(self.access, holder=holder))
        if not isinstance(holder, Tensor):  # a copy of a parameter lacks attributes
            duplicate.value = value
        duplicate.reported = self.reported
        return duplicate

    def kept(self) -> Any:
        """A copy of its present value; of a tensor only if code read its values."""
        value = copied(self.access.present())
        return value.detach().clone() if self.access.by_value and isinstance(value, Tensor) else value

    def look(self) -> None:
        """Note the present value in ``names``."""
        self.raw = dict.get(self.names, self.access.place.name, ABSENT)

    def beyond(self) -> Any:
        """Its value in ``owner``, if it does not lie in ``names``."""
        return getattr(self.owner, self.access.place.name, ABSENT) if self.raw is ABSENT else ABSENT

    @property
    def is_registry(self) -> bool:
        """Whether it is a dictionary of functions and classes outside the model, which holds no settings."""
        value = self.value
        return self.access.shared and isinstance(value, dict) and bool(value) and all(map(callable, value.values()))

    def has_changed(self) -> bool:
        """Whether its value means something else than when it was recorded."""
        place, before = self.access.place, self.value
        now = without_defaults(self.access.present(), before)
        if same(before, now) or (self.access.shared and _only_filled(before, now)):
            return False
        # Hugging Face's Trainer sets it on every configuration; a model reads a missing one as no cache.
        return not (place.name == "use_cache" and place.held and before is ABSENT and now is False)


def _in_copy(value: Any, memo: dict[int, Any]) -> Any:
    """A recorded value with the objects of a copied model, which are in ``memo``, in place of those of the model."""
    if type(value) in (list, tuple, deque):
        return type(value)(_in_copy(part, memo) for part in value)
    if type(value) is dict:
        return {key: _in_copy(part, memo) for key, part in value.items()}
    return memo.get(id(value), value)


def _only_filled(before: Any, now: Any) -> bool:
    """Whether a dictionary outside the model has only more entries, none of them a setting: a registry, or a cache."""
    if not (isinstance(before, dict) and isinstance(now, dict) and before.keys() <= now.keys()):
        return False
    added = (now[key] for key in now.keys() - before.keys())
    return all(same(value, now[key]) for key, value in before.items()) and not any(isinstance(x, PLAIN) for x in added)
