"""Settings that forward reads in objects of any class, as globals and in modules; a change of one is told once."""

from __future__ import annotations

import argparse
import copy
import functools
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import fractrainify
from tests.capture.circumstances.models import FLOAT, ROWS, TwoLayers, original_of, told_once


class AttrDict(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class Private:
    """Its setting is a property over another attribute."""

    def __init__(self) -> None:
        self._scale = 1.0

    @property
    def scale(self) -> float:
        return self._scale


class Wrapping:
    """Finds its settings in a dictionary."""

    def __init__(self) -> None:
        self._fields = {"scale": 1.0}

    def __getattr__(self, name: str) -> Any:
        if name == "_fields" or name not in self._fields:
            raise AttributeError(name)
        return self._fields[name]


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


@dataclass(slots=True)
class SlottedData:
    scale: float = 1.0


class Row(NamedTuple):
    scale: float = 1.0


class Head(Enum):
    FIRST, BOTH = 1, 3


class Criterion:
    """A callable with settings inside."""

    def __init__(self) -> None:
        self.cfg = argparse.Namespace(scale=1.0)

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.cfg.scale

    def value(self, x: Tensor) -> Tensor:
        return x * self.cfg.scale


def _scaled(x: Tensor, *, scale: float) -> Tensor:
    return x * scale


CHOICE = Head.FIRST
ARGS, SPACE, WRAPPED, PRIVATE = argparse.Namespace(scale=1.0), SimpleNamespace(scale=1.0), Wrapping(), Private()
DOTTED, ORDERED, DEFAULTS = AttrDict(scale=1.0), OrderedDict(scale=1.0), defaultdict(float, scale=1.0)
SLOTTED, SLOTTED_DATA, CRITERION, ROW = Slotted(), SlottedData(), Criterion(), Row()
LOCAL, NESTED = threading.local(), argparse.Namespace(model=argparse.Namespace(head=AttrDict(scale=1.0)))
LOCAL.scale = 1.0
PARTIAL, BOUND = functools.partial(_scaled, scale=1.0), CRITERION.value
_CONFIG = argparse.Namespace(scale=1.0)


def get_config() -> Any:
    return _CONFIG


GLOBALS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[float], Any]]] = {
    "parsed arguments": (lambda x: x * ARGS.scale, lambda v: setattr(ARGS, "scale", v)),
    "a namespace": (lambda x: x * SPACE.scale, lambda v: setattr(SPACE, "scale", v)),
    "a dictionary with attributes": (lambda x: x * DOTTED.scale, lambda v: setattr(DOTTED, "scale", v)),
    "an ordered dictionary": (lambda x: x * ORDERED["scale"], lambda v: ORDERED.update(scale=v)),
    "a dictionary with a default": (lambda x: x * DEFAULTS["scale"], lambda v: DEFAULTS.update(scale=v)),
    "a property": (lambda x: x * PRIVATE.scale, lambda v: setattr(PRIVATE, "_scale", v)),
    "a wrapped dictionary": (lambda x: x * WRAPPED.scale, lambda v: WRAPPED._fields.update(scale=v)),
    "the present thread": (lambda x: x * LOCAL.scale, lambda v: setattr(LOCAL, "scale", v)),
    "the result of a function": (lambda x: x * get_config().scale, lambda v: setattr(_CONFIG, "scale", v)),
    "slots": (lambda x: x * SLOTTED.scale, lambda v: setattr(SLOTTED, "scale", v)),
    "slots of a dataclass": (lambda x: x * SLOTTED_DATA.scale, lambda v: setattr(SLOTTED_DATA, "scale", v)),
    "a choice": (lambda x: x * CHOICE.value, lambda v: globals().update(CHOICE=Head(v))),
    "a named tuple": (lambda x: x * ROW.scale, lambda v: globals().update(ROW=Row(v))),
    "objects in objects": (
        lambda x: x * NESTED.model.head.scale,
        lambda v: setattr(NESTED.model.head, "scale", v),
    ),
    "another object": (lambda x: x * ARGS.scale, lambda v: globals().update(ARGS=argparse.Namespace(scale=v))),
    "a callable": (lambda x: CRITERION(x), lambda v: setattr(CRITERION.cfg, "scale", v)),
    "a bound method": (lambda x: BOUND(x), lambda v: setattr(CRITERION.cfg, "scale", v)),
    "a partial": (lambda x: PARTIAL(x), lambda v: PARTIAL.keywords.update(scale=v)),
}


class ReadsGlobal(TwoLayers):
    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.read(self.a(x)))


@pytest.mark.parametrize("place", GLOBALS)
def test_the_next_call_tells_of_a_setting_in_a_global_object(place: str) -> None:
    read, change = GLOBALS[place]
    model = fractrainify(ReadsGlobal(read), config=FLOAT, example_inputs=(ROWS,))
    try:
        told_once(model, lambda: change(3.0))
    finally:
        change(1.0)


def _scheduler() -> Any:
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), 1)


def _trainer() -> Any:
    class Part:
        """One of the objects of a trainer."""

    top = at = Part()
    for name in ("loop", "progress", "current"):
        setattr(at, name, Part())
        at = getattr(at, name)
    at.n = 1  # type: ignore[attr-defined]
    return top


def _set_rate(scheduler: Any) -> None:
    scheduler.optimizer.step()
    scheduler.step()


HELD: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Tensor], Callable[[Any], Any]]] = {
    "parsed arguments": (
        lambda: argparse.Namespace(scale=1.0),
        lambda held, x: x * held.scale,
        lambda held: setattr(held, "scale", 3.0),
    ),
    "a dictionary with attributes": (
        lambda: AttrDict(scale=1.0, sub=AttrDict(scale=1.0)),
        lambda held, x: x * held.sub.scale,
        lambda held: setattr(held.sub, "scale", 3.0),
    ),
    "a dictionary with a default": (
        lambda: defaultdict(float, scale=1.0),
        lambda held, x: x * held["scale"],
        lambda held: held.update(scale=3.0),
    ),
    "a property": (Private, lambda held, x: x * held.scale, lambda held: setattr(held, "_scale", 3.0)),
    "a wrapped dictionary": (Wrapping, lambda held, x: x * held.scale, lambda held: held._fields.update(scale=3.0)),
    "slots": (Slotted, lambda held, x: x * held.scale, lambda held: setattr(held, "scale", 3.0)),
    "slots of a dataclass": (SlottedData, lambda held, x: x * held.scale, lambda held: setattr(held, "scale", 3.0)),
    "a callable": (Criterion, lambda held, x: held(x), lambda held: setattr(held.cfg, "scale", 3.0)),
    "a bound method": (
        lambda: Criterion().value,
        lambda held, x: held(x),
        lambda held: setattr(held.__self__.cfg, "scale", 3.0),
    ),
    "a partial": (
        lambda: functools.partial(_scaled, scale=1.0),
        lambda held, x: held(x),
        lambda held: held.keywords.update(scale=3.0),
    ),
    "an object in a partial": (
        lambda: functools.partial(lambda cfg, x: x * cfg.scale, SimpleNamespace(scale=1.0)),
        lambda held, x: held(x),
        lambda held: setattr(held.args[0], "scale", 3.0),
    ),
    "an optimizer": (
        lambda: torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0),
        lambda held, x: x * held.param_groups[0]["lr"],
        lambda held: held.param_groups[0].update(lr=3.0),
    ),
    "a schedule of torch": (_scheduler, lambda held, x: x * held.get_last_lr()[0], _set_rate),
    "a trainer": (
        _trainer,
        lambda held, x: x * held.loop.progress.current.n,
        lambda held: setattr(held.loop.progress.current, "n", 3),
    ),
}


class ReadsHeld(TwoLayers):
    def __init__(self, held: Any, read: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.held, self.read = held, read

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.read(self.held, self.a(x)))


@pytest.mark.parametrize("place", HELD)
def test_the_next_call_tells_of_a_setting_in_an_object_that_a_module_holds(place: str) -> None:
    make, read, change = HELD[place]
    model = fractrainify(ReadsHeld(make(), read), config=FLOAT, example_inputs=(ROWS,))
    told_once(model, lambda: change(original_of(model).held))


@pytest.mark.parametrize("place", HELD)
def test_a_copy_is_told_of_settings_in_its_own_objects_alone(place: str) -> None:
    make, read, change = HELD[place]
    model = fractrainify(ReadsHeld(make(), read), config=FLOAT, example_inputs=(ROWS,))
    twin = copy.deepcopy(model)
    change(original_of(model).held)
    told_once(twin, lambda: change(original_of(twin).held))
