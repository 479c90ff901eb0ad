"""Settings many levels deep, in dictionaries with defaults, and in objects that a helper function reads."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fractrain_fx import fractrainify
from fractrain_fx.errors import FracTrainWarning
from tests.capture.circumstances.models import FLOAT, ROWS, TwoLayers, original_of, told_once


class Options:
    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


def _options() -> Options:
    return Options(model=Options(block=Options(drop=Options(scale=1.0))))


def _dictionary() -> dict[str, Any]:
    return {"model": {"block": {"drop": {"scale": 1.0}}}}


GLOBAL = _options()


def _scale(options: Options) -> Any:
    return options.model.block.drop.scale  # type: ignore[attr-defined]


def _global_scale() -> Any:
    return _scale(GLOBAL)


def _in_dictionary(held: Any) -> Any:
    return held["model"]["block"]["drop"]


def _set(held: Any) -> None:
    held.model.block.drop.scale = 2.0


NESTED: dict[str, tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any], None]]] = {
    "dictionaries": (
        _dictionary,
        lambda held: _in_dictionary(held)["scale"],
        lambda held: _in_dictionary(held).update(scale=2.0),
    ),
    "dictionaries in tuples": (
        lambda: [({"a": _dictionary()},)],
        lambda held: _in_dictionary(held[0][0]["a"])["scale"],
        lambda held: _in_dictionary(held[0][0]["a"]).update(scale=2.0),
    ),
    "objects": (_options, _scale, _set),
    "a global object": (lambda: GLOBAL, lambda held: _global_scale(), _set),
    "a filled default": (
        lambda: defaultdict(lambda: 1.0),
        lambda held: held["scale"],
        lambda held: held.update(scale=2.0),
    ),
}


class ReadsNested(TwoLayers):
    def __init__(self, held: Any, read: Callable[[Any], float]) -> None:
        super().__init__()
        self.held, self.read = held, read

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) * self.read(self.held))


class ReadsGlobal(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) * _global_scale())


@pytest.mark.parametrize("place", NESTED)
def test_the_next_call_tells_of_a_setting_many_levels_deep(place: str) -> None:
    make, read, change = NESTED[place]
    model = fractrainify(ReadsNested(make(), read), config=FLOAT, example_inputs=(ROWS,))
    held = original_of(model).held
    try:
        told_once(model, lambda: change(held))
    finally:
        GLOBAL.model.block.drop.scale = 1.0  # type: ignore[attr-defined]


def test_the_next_call_tells_of_a_global_object_that_only_a_helper_function_reads() -> None:
    model = fractrainify(ReadsGlobal(), config=FLOAT, example_inputs=(ROWS,))
    try:
        told_once(model, lambda: _set(GLOBAL))
    finally:
        GLOBAL.model.block.drop.scale = 1.0  # type: ignore[attr-defined]


def test_a_default_that_the_original_fills_is_no_change() -> None:
    make, read, _ = NESTED["a filled default"]
    model = fractrainify(ReadsNested(make(), read), config=FLOAT, example_inputs=(ROWS,))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FracTrainWarning)
        model(ROWS)
        assert original_of(model).held["scale"] == 1.0
        torch.testing.assert_close(model(ROWS), original_of(model)(ROWS))  # both compute the same products
