"""Check that a model is what was recorded: its structure, and attributes and hooks that its graph cannot follow.

Every call compares by identity, in C; mode switches, and calls that found a difference, compare closely.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sized
from functools import partial
from itertools import repeat
from operator import is_, is_not
from typing import Any, Self

from torch import Tensor, nn

from fractrain_fx.capture.circumstances.access import ABSENT, Access
from fractrain_fx.capture.circumstances.notices import Notice
from fractrain_fx.capture.circumstances.structure import ADAPTERS_FIRST, SHARDED_ELSEWHERE, Structure
from fractrain_fx.capture.circumstances.watched import WatchedAttribute
from fractrain_fx.capture.compare import same
from fractrain_fx.capture.source import is_within, listed, warn
from fractrain_fx.capture.trees import version_of
from fractrain_fx.errors import ModelError

__all__ = ["OriginalCheck"]

_REWRITE = "call fractrainify(model.restore()) again for it to count"
_listed = partial(listed, most=4, mark="; ")
_SMALL = 64  # entries of a container that every call compares
_INNERMOST = 8  # levels of containers, one in the other, that every call compares
_MOST = 256  # containers of one attribute below the third level that every call compares
_HOOK_KINDS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}


_OF_ALL: Mapping[str, tuple[dict[int, Any], str]] = {
    kind: (vars(nn.modules.module)[f"_global{kind}"], words) for kind, words in _HOOK_KINDS.items()
}
"""Hooks that torch runs on all modules."""


class OriginalCheck:
    """The structure, attributes and hooks of a model that its graphs were recorded from.

    The values of the attributes ``read`` decided what was recorded. ``called`` has paths of the modules that the graphs
    call, whose inside is not theirs.
    """

    def __init__(
        self, model: nn.Module, graph_module: nn.Module, read: Iterable[Access], called: Collection[str]
    ) -> None:
        self.structure = Structure(model, graph_module, frozenset(called))
        modules = self.structure.modules
        self.uncalled = {path: module for path, module in modules.items() if not is_within(path, called)}
        self._attributes = list(map(WatchedAttribute, read))
        self._hooks = {path: set(_hooks_of(module)) for path, module in self.uncalled.items()}
        self._of_all = set(_hooks_of_all())
        self._note()

    def check(self) -> None:
        """Compare by identity, at every call; compare closely if anything differs."""
        if not self._as_noted():
            self.check_closely()

    def check_closely(self) -> None:
        """Refuse another structure and sharded layers that the graph does not call; warn of changes without effect."""
        self.require_structure("the rewritten model still runs the graph of the old structure")
        if any(hasattr(module, "set_requires_gradient_sync") for path, module in self.uncalled.items() if path):
            raise ModelError(SHARDED_ELSEWHERE)
        self._require_adapters_apart()
        if changes := list(self._changed_attributes()):
            warn(f"without effect on the rewritten model: {_listed(changes)}; {_REWRITE}")
        if hooks := list(self._new_hooks()):
            warn(
                f"never run: {_listed(hooks)}. The rewritten graph does the work of these modules without calling "
                "them: put the hook on the rewritten model itself, or on the module before fractrainify, which then "
                "keeps it whole"
            )
        self._note()

    def watch(self, read: Iterable[Access]) -> None:
        """Watch the attributes that another recording read, too."""
        known = {attribute.access.key for attribute in self._attributes}
        self._attributes += [WatchedAttribute(access) for access in read if access.key not in known]
        self._note()

    def adopt(self) -> None:
        """Take over what a run of the original, which compared it with its graph, has changed outside the model."""
        if not self._as_noted():
            for attribute in self._attributes:
                now = attribute.access.present()
                if not same(attribute.value, now):
                    attribute.value = attribute.kept()
                attribute.look()
            self._note()

    def reads(self, name: str) -> bool:
        """Whether the recording read this attribute of the model itself, or found that it is missing."""
        return any(str(attribute.access.place) == name for attribute in self._attributes)

    def require_structure(self, what: str, way_out: str = "") -> None:
        """Refuse modules and parameters that are not the graph's; the message has the consequence and a ``way_out``."""
        if differences := self.structure.differences():
            if self.structure.has_new_adapters:
                way_out += f"; or, after peft_model.unload(), {ADAPTERS_FIRST}"
            raise ModelError(
                f"the model's structure has changed since fractrainify: {_listed(differences)}. {what[0].upper()}"
                f"{what[1:]}: undo the change, or rewrite the model as it is now with "
                f"fractrainify(model.restore(structure_changed=True), ...){way_out}"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """The same for a copy of the model, whose modules are in ``memo``."""
        duplicate = type(self).__new__(type(self))
        for name in ("structure", "uncalled", "_attributes", "_hooks", "_of_all"):
            setattr(duplicate, name, copy.deepcopy(getattr(self, name), memo))
        duplicate._note()
        return duplicate

    def _require_adapters_apart(self) -> None:
        """Refuse weights into which PEFT has merged adapters that the graph adds, or the other way round."""
        for attribute in self._attributes:
            place = attribute.access.place
            if place.name == "merged_adapters" and not same(attribute.value, attribute.access.present()):
                raise ModelError(
                    f"PEFT's adapters of {place.module!r} were merged or unmerged since fractrainify, so they would "
                    "count twice or not at all: undo it (model.unmerge_adapter() after model.merge_adapter()), or "
                    "merge after training, on model.restore()"
                )

    def _changed_attributes(self) -> Iterator[str]:
        """The attributes whose value has changed since recording, in words; each is reported once."""
        for attribute in self._attributes:
            if attribute.has_changed() and not attribute.reported:
                before, now = map(_in_words, (attribute.value, attribute.access.present()))
                yield f"{attribute.access.place} was {before} when the model was recorded and is {now}"
                attribute.reported = True
            attribute.look()

    def _new_hooks(self) -> Iterator[str]:
        """Hooks that were added since the last comparison, in words."""
        for path, module in self.uncalled.items():
            hooks = _hooks_of(module)
            new = (words for key, words in hooks.items() if key not in self._hooks[path])
            yield from (f"{words} of {path!r}" if path else f"{words} of the original itself" for words in new)
            self._hooks[path] = set(hooks)
        of_all = _hooks_of_all()
        yield from (f"{words} of all modules" for key, words in of_all.items() if key not in self._of_all)
        self._of_all = set(of_all)

    def _note(self) -> None:
        places = [(attribute.names, attribute.access.place.name, attribute.raw) for attribute in self._attributes]
        places += [*self.structure.children(), *((held, name, None) for _, held, name in self.structure.tensorless())]
        self._dictionaries = [dictionary for dictionary, _, _ in places]
        self._names = [name for _, name, _ in places]
        self._values = [value for _, _, value in places]
        owners = [module._parameters for module in self.structure.modules.values()]
        parameters = [(owner, name) for owner in owners for name, x in owner.items() if x is not None]
        self._owners = [owner for owner, _ in parameters]
        self._parameters = [name for _, name in parameters]
        looks = {(id(each.owner), each.access.place.name): each for each in self._attributes if each.raw is ABSENT}
        stable = [each for each in looks.values() if each.beyond() is each.beyond()]
        self._holders = [each.owner for each in stable]
        self._held_names = [each.access.place.name for each in stable]
        self._held = [each.beyond() for each in stable]
        compared = (each for each in self._attributes if not (each.reported or each.is_registry))
        held = (each.beyond() if each.raw is ABSENT else each.raw for each in compared)
        self._contents = [(part, tuple(part)) for raw in held for part in _containers(raw)]
        by_value = (each.raw for each in self._attributes if each.access.by_value)
        self._tensors = [x for x in by_value if isinstance(x, Tensor)]
        self._versions = list(map(version_of, self._tensors))
        hooks = (vars(module)[kind] for module in self.uncalled.values() for kind in _HOOK_KINDS)
        of_all = (hooks for hooks, _ in _OF_ALL.values())
        self._counted: list[Sized] = [*hooks, *of_all, *self.structure.containers()]
        self._counts = list(map(len, self._counted))

    def _as_noted(self) -> bool:
        return (
            all(map(is_, map(dict.get, self._dictionaries, self._names, repeat(ABSENT)), self._values))
            and all(map(is_, map(getattr, self._holders, self._held_names, repeat(ABSENT)), self._held))
            and all(map(is_not, map(dict.get, self._owners, self._parameters), repeat(None)))
            and list(map(len, self._counted)) == self._counts
            and list(map(version_of, self._tensors)) == self._versions
            and all(len(part) == len(items) and all(map(is_, part, items)) for part, items in self._contents)
        )


def _containers(value: Any) -> Iterator[Collection[Any]]:
    """The small containers in an attribute, each as something whose items can be compared by identity.

    The outer ones come first. Below the third level, where a container is rarely more than settings, only some count.
    """
    seen: set[int] = set()
    level, left = [value], _MOST
    for depth in range(_INNERMOST):
        below: list[Any] = []
        for part in level[: left if depth > 2 else None]:
            if id(part) in seen or not isinstance(part, (dict, list, tuple, set, deque)) or len(part) > _SMALL:
                continue
            seen.add(id(part))
            left -= depth > 2
            if isinstance(part, dict):
                yield part.keys()
            items: Collection[Any] = part.values() if isinstance(part, dict) else part
            if not isinstance(part, tuple):  # which never holds other items
                yield items
            below += items
        level = below


def _hooks_of(module: nn.Module) -> dict[Any, str]:
    hooks: dict[Any, str] = {}
    for kind, words in _HOOK_KINDS.items():
        for key, hook in vars(module)[kind].items():
            if not isinstance(hook, Notice):
                hooks[kind, key] = _named(words, hook)
    if "forward" in vars(module):
        hooks["forward", id(vars(module)["forward"])] = "the forward that was set on the instance"
    return hooks


def _hooks_of_all() -> dict[Any, str]:
    """The hooks of all modules, without those of torch's own tools, which only count."""
    return {
        (kind, key): _named(words, hook)
        for kind, (hooks, words) in _OF_ALL.items()
        for key, hook in hooks.items()
        if not str(getattr(hook, "__module__", "")).startswith("torch.")
    }


def _named(words: str, hook: Any) -> str:
    return f"the {words} {getattr(hook, '__qualname__', type(hook).__qualname__)}"


def _in_words(value: Any) -> str:
    if value is ABSENT:
        return "not there"
    words = repr(value)
    return words if len(words) < 60 and "\n" not in words else f"another {type(value).__name__}"
