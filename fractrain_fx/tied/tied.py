"""Check that the original still is what was recorded: a cheap look at every call, a close look after changes."""

from __future__ import annotations

import copy
from collections.abc import Sized
from itertools import repeat
from operator import is_, is_not
from typing import Any, Self

from torch import nn

from fractrain_fx.capture import Recording
from fractrain_fx.capture.outside.attributes import ABSENT
from fractrain_fx.errors import ModelError
from fractrain_fx.nn.quantized_leaf import QuantizedLeaf
from fractrain_fx.tied.attributes import TiedAttributes
from fractrain_fx.tied.hooks import TiedHooks
from fractrain_fx.tied.structure import ADAPTERS_FIRST, SHARDED_ELSEWHERE, Structure
from fractrain_fx.tied.telling import warn

__all__ = ["Tied"]

_REWRITE = "call fractrainify(model.restore()) again for it to count"


class Tied:
    """The structure, attributes and hooks of the original that a rewritten model was made for.

    Args:
        original: the model that was passed to ``fractrainify``.
        recording: its graphs, and the Python state that they depend on.
    """

    def __init__(self, original: nn.Module, recording: Recording) -> None:
        called = _called_by(original, recording)
        self.structure = Structure(original, recording.train, called)
        self._attributes = TiedAttributes(original, recording.python.read)
        modules = self.structure.modules
        self.uncalled = {path: module for path, module in modules.items() if not _is_within(path, called)}
        self._hooks = TiedHooks(self.uncalled)
        self._note()

    def look(self) -> None:
        """Compare by identity, all in C, at every call; look closely if anything differs.

        Raises:
            ModelError: modules or parameters are not those of the graph.
        """
        if not self._as_noted():
            self.look_closely()

    def look_closely(self) -> None:
        """Compare modules, parameters, attributes and hooks; warn of changes without effect.

        Raises:
            ModelError: modules or parameters are not those of the graph, or layers are sharded that it does not call.
        """
        self.require_structure("the rewritten model still runs the graph of the old structure")
        if any(hasattr(module, "set_requires_gradient_sync") for path, module in self.uncalled.items() if path):
            raise ModelError(SHARDED_ELSEWHERE)
        changes = self._attributes.changes()
        if changes:
            warn(f"without effect on the rewritten model: {_listed(changes)}; {_REWRITE}")
        hooks = self._hooks.changes()
        if hooks:
            warn(
                f"never run: {_listed(hooks)}. The rewritten graph does the work of these modules without calling "
                "them: put the hook on the rewritten model itself, or on the module before fractrainify, which then "
                "keeps it whole"
            )
        self._note()

    def reads(self, name: str) -> bool:
        """Whether the recording read this attribute of the original, or found that it is missing."""
        return self._attributes.reads(name)

    def require_structure(self, what: str, way_out: str = "") -> None:
        """Compare modules and parameters with those of the graph.

        Args:
            what: the consequence of a difference, for the message.
            way_out: another remedy, for the message.

        Raises:
            ModelError: they differ.
        """
        if differences := self.structure.differences():
            if self.structure.has_new_adapters:
                way_out += f"; or, after peft_model.unload(), {ADAPTERS_FIRST}"
            raise ModelError(
                f"the model's structure has changed since fractrainify: {_listed(differences)}. {what[0].upper()}"
                f"{what[1:]}: undo the change, or rewrite the model as it is now with "
                f"fractrainify(model.restore(structure_changed=True), ...){way_out}"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """The ties of a copy of the original, whose modules are in ``memo``."""
        duplicate = type(self).__new__(type(self))
        for name in ("structure", "_attributes", "uncalled", "_hooks"):
            setattr(duplicate, name, copy.deepcopy(getattr(self, name), memo))
        duplicate._note()
        return duplicate

    def _note(self) -> None:
        places = [*self._attributes.own(), *self.structure.children(), *self.structure.tensorless()]
        self._dictionaries = [dictionary for dictionary, _, _ in places]
        self._names = [name for _, name, _ in places]
        self._values = [value for _, _, value in places]
        owners = [module._parameters for module in self.structure.modules.values()]
        parameters = [(owner, name) for owner in owners for name, x in owner.items() if x is not None]
        self._owners = [owner for owner, _ in parameters]
        self._parameters = [name for _, name in parameters]
        self._lists = self._attributes.lists()
        self._contents = list(map(list, self._lists))
        self._counted: list[Sized] = [*self._hooks.counted(), *self.structure.containers()]
        self._counts = list(map(len, self._counted))

    def _as_noted(self) -> bool:
        return (
            all(map(is_, map(dict.get, self._dictionaries, self._names, repeat(ABSENT)), self._values))
            and all(map(is_not, map(dict.get, self._owners, self._parameters), repeat(None)))
            and list(map(len, self._counted)) == self._counts
            and self._lists == self._contents
        )


def _called_by(original: nn.Module, recording: Recording) -> frozenset[str]:
    """Paths of the modules that the graphs call, also of those that are called with rounded weights."""
    paths = {id(module): path for path, module in original.named_modules()}
    called = set()
    for graph in recording.graphs:
        for node in graph.graph.find_nodes(op="call_module"):
            module = graph.get_submodule(str(node.target))
            leaf = module.leaf if isinstance(module, QuantizedLeaf) else module
            called.add(paths.get(id(leaf), str(node.target)))
    return frozenset(called)


def _is_within(path: str, others: frozenset[str]) -> bool:
    """Whether a path is one of the others, or below one."""
    parts = path.split(".")
    return any(".".join(parts[: i + 1]) in others for i in range(len(parts)))


def _listed(found: list[str]) -> str:
    return "; ".join(found[:4]) + (f"; and {len(found) - 4} more" if len(found) > 4 else "")
