"""Watch which Python attributes of its modules a model reads and sets while it is recorded."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from fractrain_fx.capture.circumstances.access import ABSENT, COMPARED, Access, AttributePath
from fractrain_fx.capture.circumstances.holders import holders
from fractrain_fx.capture.circumstances.variables import variables
from fractrain_fx.capture.compare import copied, same, without_defaults
from fractrain_fx.capture.recording import patch
from fractrain_fx.capture.recording.recorder import Recorder
from fractrain_fx.capture.replaced import Replacement, replaced
from fractrain_fx.capture.source import by_library, outside_capture

__all__ = ["Attributes"]

# The attributes that torch itself keeps on a module, and its methods.
_OF_TORCH = frozenset({*vars(nn.Module()), *dir(nn.Module), "__dict__"})


class Attributes:
    """Notes each read and each setting of a plain attribute while a recorder writes.

    While the recorder is paused nothing is noted: a module or function that stays one call runs then, and it reads its
    attributes again at every run. ``variables`` are those outside of modules that the code of the run names.
    """

    def __init__(self, model: nn.Module, recorder: Recorder) -> None:
        self._model, self._recorder = model, recorder
        self._places = holders(model)
        self.accesses: dict[tuple[int, str], Access] = {}
        self.variables: list[Access] = []

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """Watch inside."""
        held = {type(holder) for holder, _, name in self._places.values() if name} - {SimpleNamespace}
        places: list[Replacement] = [(nn.Module, "__getattr__", self._missing(nn.Module.__getattr__))]
        for name, wrapper in (("__getattribute__", self._getter), ("__setattr__", self._setter)):
            kinds = {nn.Module, *(_owner_of(name, kind) for kind in held)}
            places += [(kind, name, wrapper(getattr(kind, name))) for kind in kinds]
        with replaced(*places):
            yield
        seen = [key for key, (holder, *_) in self._places.items() if not isinstance(holder, SimpleNamespace)]
        self.variables = list(variables(self._model, self._recorder.codes, frozenset(seen)))

    def carried(self) -> list[Access]:
        """Attributes that the run read before it gave them another value."""
        return [
            access
            for access in self.accesses.values()
            if access.carried and not same(access.value, without_defaults(access.present(), access.value))
        ]

    def left_behind(self) -> list[Access]:
        """Attributes that the run set to another value and never read: they serve code around the model.

        A tensor, and a size of one, is another value in each call. An attribute that is read may be a table.
        """
        unread = [access for access in self.accesses.values() if access.set_at and not access.read_at]
        return [
            access
            for access in unread
            if isinstance(access.present(), Tensor) or not same(access.value, access.present())
        ]

    def set_otherwise(self) -> list[Access]:
        """Attributes that the run set to other values; notes what it left in all of them."""
        for access in self.accesses.values():
            access.left = copied(access.present())
        return [access for access in self.accesses.values() if access.set_at and not same(access.value, access.left)]

    def filled(self) -> list[Access]:
        """Containers in which the run has left tensors that it was given or computed."""

        def computed(x: Tensor) -> bool:
            node = self._recorder.writer.known(x)
            return node is not None and node.op != "get_attr"

        return [
            access for access in (*self.accesses.values(), *self.variables) if any(map(computed, access.contents()))
        ]

    def _getter(self, real: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        places, ambient, writer = self._places, self._recorder.ambient, self._recorder.writer

        def read(holder: Any, name: str) -> Any:
            try:
                if isinstance(getattr(type(holder), name, None), cached_property) and self._sees(holder, name):
                    self._note_read(holder, name, vars(holder).get(name, ABSENT))
                value = real(holder, name)
            except AttributeError:
                if not hasattr(type(holder), "__getattr__") and self._sees(holder, name):
                    self._note_read(holder, name, ABSENT)
                raise
            if name == "training" and id(holder) in places:
                ambient.read_mode(places[id(holder)][1], value, sys._getframe(1))
            if name == "__dict__" and id(holder) in places and not (writer.paused or by_library(sys._getframe(1))):
                for key, held in list(value.items()):  # code may read any of them
                    if self._sees(holder, key) and _is_plain(holder, key, held):
                        self._note_read(holder, key, held)
            if self._sees(holder, name) and ((id(holder), name) in self.accesses or _is_plain(holder, name, value)):
                self._note_read(holder, name, value)
            return value

        return read

    def _missing(self, real: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        """Note attributes that a module does not have, as ``getattr(self, "scale", 1.0)`` asks for them."""

        def read(holder: Any, name: str) -> Any:
            try:
                return real(holder, name)
            except AttributeError:
                if type(holder).__getattr__ is read and self._sees(holder, name):
                    self._note_read(holder, name, ABSENT)
                raise

        return read

    def _setter(self, real: Callable[[Any, str, Any], None]) -> Callable[[Any, str, Any], None]:
        places, recorder = self._places, self._recorder

        def write(holder: Any, name: str, value: Any) -> None:
            if name == "training" and id(holder) in places:
                recorder.ambient.set_mode(places[id(holder)][1])
            if self._sees(holder, name) and name not in vars(holder).get("_buffers", ()):
                before = vars(holder).get(name, ABSENT)
                access = self.accesses.get((id(holder), name)) or self._access(holder, name, before, carried=False)
                frame = sys._getframe(1)
                access.writers.add(recorder.writer.path)
                access.set_at.add((frame.f_code, frame.f_lineno))
            real(holder, name, value)

        return write

    def _sees(self, holder: Any, name: str) -> bool:
        if self._recorder.writer.paused or name.startswith("__") or id(holder) not in self._places:
            return False
        return name not in _OF_TORCH or not issubclass(type(holder), nn.Module)

    def _note_read(self, holder: Any, name: str, value: Any) -> None:
        frame = outside_capture(sys._getframe(2))
        if value is ABSENT and by_library(frame):
            return
        access = self.accesses.get((id(holder), name)) or self._access(holder, name, value, carried=True)
        access.readers.add(self._recorder.writer.path)
        access.read_at.add((frame.f_code, frame.f_lineno))
        if isinstance(value, SimpleNamespace) and id(value) in self._places:  # its reads cannot be watched
            for field_name, part in vars(value).items():
                self._note_read(value, field_name, part)

    def _access(self, holder: Any, name: str, value: Any, carried: bool) -> Access:
        _, path, held = self._places[id(holder)]
        access = Access(holder, AttributePath(path, held, name), copied(value), carried)
        self.accesses[id(holder), name] = access
        return access


def _is_plain(holder: Any, name: str, value: Any) -> bool:
    """Whether Python code set ``value``: it is not a module, a method or computed by a property."""
    if isinstance(value, nn.Module) or getattr(value, "__module__", None) == patch.__name__:
        return False  # a stand-in for a method that stays one call; it is on the module only while recording
    if name in vars(holder):
        return True
    return isinstance(value, COMPARED) and any(vars(kind).get(name, ABSENT) is value for kind in type(holder).__mro__)


def _owner_of(method: str, kind: type) -> type:
    """The class whose special method instances of ``kind`` use, or ``kind`` if that is Python's own."""
    return next((base for base in kind.__mro__[:-1] if method in vars(base)), kind)
