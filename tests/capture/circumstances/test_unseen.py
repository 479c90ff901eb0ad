"""Settings that code reads which computes nothing itself, and those on classes and parameters; caches are silent."""

from __future__ import annotations

import functools
import logging
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import fractrainify
from fractrain_fx.errors import FracTrainWarning
from tests.capture.circumstances.models import FLOAT, ROWS, TwoLayers, original_of, told_once
from tests.models import ScaledGradient

HEAD = 1


class Layer(TwoLayers):
    """Calls nothing but its parts; the class says which."""

    active = 1

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) if self.active > 1 else self.a(x)


class Heads(TwoLayers):
    """Calls nothing but its parts; a global says which."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) if HEAD > 1 else self.a(x)


class ByClass(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) if Layer.active > 1 else self.a(x)


class Reversing(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(ScaledGradient.apply(self.a(x), HEAD))


def _apply(net: Any, x: Tensor) -> Any:
    return net.b(x) if HEAD > 1 else x


class Helped(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return _apply(self, self.a(x))


PARTS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], str]] = {
    "a global": (Heads, lambda v: globals().update(HEAD=v), "HEAD was 1"),
    "a global of a nested module": (lambda: nn.Sequential(Heads()), lambda v: globals().update(HEAD=v), "HEAD was 1"),
    "a global of a function": (Helped, lambda v: globals().update(HEAD=v), "HEAD was 1"),
    "an argument of an autograd function": (Reversing, lambda v: globals().update(HEAD=v), "HEAD was 1"),
    "the class of the module": (Layer, lambda v: setattr(Layer, "active", v), "active was 1"),
    "a named class": (ByClass, lambda v: setattr(Layer, "active", v), "Layer.active was 1"),
}


@pytest.mark.parametrize("place", PARTS)
def test_the_next_call_tells_of_what_code_reads_that_only_calls_modules(place: str) -> None:
    make, change, words = PARTS[place]
    model = fractrainify(make(), config=FLOAT, example_inputs=(ROWS,))
    try:
        told_once(model, lambda: change(3), words)
    finally:
        change(1)


class Masked(TwoLayers):
    """Reads what code outside has put on its weights."""

    def __init__(self) -> None:
        super().__init__()
        first, last = self.weights()
        first.keep, last.mask = 1.0, torch.ones(4)

    def weights(self) -> tuple[Any, Any]:
        return self.a.weight, self.b.weight

    def forward(self, x: Tensor) -> Tensor:
        first, last = self.weights()
        return self.b(self.a(x) * first.keep * last.mask)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda net: setattr(net.a.weight, "keep", 3.0), r"weight\.keep was 1\.0"),
        (lambda net: setattr(net.b.weight, "mask", torch.zeros(4)), r"weight\.mask was"),
    ],
    ids=["a number", "a tensor"],
)
def test_the_next_call_tells_of_an_attribute_of_a_parameter(change: Callable[[Any], Any], words: str) -> None:
    model = fractrainify(Masked(), config=FLOAT, example_inputs=(ROWS,))
    told_once(model, lambda: change(original_of(model)), words)


class Registry:
    """Finds functions by name."""

    def __init__(self) -> None:
        self._items = {"double": lambda x: 2 * x}

    def __getitem__(self, name: str) -> Callable[[Tensor], Tensor]:
        return self._items[name]

    def register(self, name: str, item: Callable[[Tensor], Tensor]) -> None:
        self._items[name] = item


TABLES: dict[int, Tensor] = {}
COUNTS: Counter[str] = Counter()
REGISTRY, LOG = Registry(), logging.getLogger(__name__)


@functools.lru_cache
def _cached(n: int) -> Tensor:
    return torch.arange(n) / 7


def _kept(n: int) -> Tensor:
    if n not in TABLES:
        TABLES[n] = torch.arange(n) / 7
    return TABLES[n]


def _logged(x: Tensor) -> Tensor:
    COUNTS["calls"] += 1
    LOG.debug("call %d", COUNTS["calls"])
    return x * 2


SILENT: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], Any]]] = {
    "a cache of Python": (lambda x: x * _cached(x.shape[0])[:, None], _cached.cache_clear),
    "a table that forward fills": (lambda x: x * _kept(x.shape[0])[:, None], lambda: _kept(50)),
    "a registry": (lambda x: REGISTRY["double"](x), lambda: REGISTRY.register("triple", lambda x: 3 * x)),
    "a logger": (_logged, lambda: LOG.setLevel(logging.ERROR)),
}


@pytest.mark.parametrize("place", SILENT)
def test_caches_registries_and_logs_are_no_settings(place: str) -> None:
    class Reads(TwoLayers):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(SILENT[place][0](self.a(x)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FracTrainWarning)  # a count is worth a note
        model = fractrainify(Reads(), config=FLOAT, example_inputs=(ROWS,))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FracTrainWarning)
        SILENT[place][1]()
        for n in range(20):
            model(torch.ones(2 + n // 4, 4))
        model.eval()(ROWS)
