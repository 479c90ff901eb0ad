"""Values that forward reads are watched wherever they lie: in containers, closures, globals, buffers."""

from __future__ import annotations

import copy
import functools
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import fractrainify
from fractrain_fx.errors import FracTrainWarning, ModelError
from tests.capture.circumstances.models import FLOAT, ROWS, original_of

SCALE = 1.0


class Knob:
    def __init__(self) -> None:
        self.gain = 1.0


def _with_closure() -> tuple[type[nn.Module], Callable[[float], None]]:
    factor = 1.0

    class Closed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * factor

    def change(value: float) -> None:
        nonlocal factor
        factor = value

    return Closed, change


class Holding(nn.Module):
    """Holds values in all kinds of places; ``place`` says which one forward reads."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.layer, self.place = nn.Linear(4, 4), place
        self.knobs, self.by_name = [Knob()], {"a": Knob()}
        self.nested: Any = {"list": [Knob(), (Knob(),)]}
        self.names, self.queue = {"one"}, deque([1.0])
        self.numbers, self.table = {"gain": [1.0]}, np.ones(2)
        self.partial = functools.partial(pow, 2)
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        match self.place:
            case "object in a list":
                return y * self.knobs[0].gain
            case "object in a dictionary":
                return y * self.by_name["a"].gain
            case "object in a tuple in a list in a dictionary":
                return y * self.nested["list"][1][0].gain
            case "set":
                return y * 2 if "two" in self.names else y
            case "deque":
                return y * self.queue[0]
            case "list in a dictionary":
                return y * self.numbers["gain"][0]
            case "array":
                return y * float(self.table[0])
            case "vars":
                return y * vars(self)["gain"]
            case "__dict__":
                return y * self.__dict__.get("gain", 3.0)
            case "global":
                return y * SCALE
        raise AssertionError(self.place)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "object in a list": lambda net: setattr(net.knobs[0], "gain", 2.0),
    "object in a dictionary": lambda net: setattr(net.by_name["a"], "gain", 2.0),
    "object in a tuple in a list in a dictionary": lambda net: setattr(net.nested["list"][1][0], "gain", 2.0),
    "set": lambda net: net.names.add("two"),
    "deque": lambda net: net.queue.appendleft(2.0),
    "list in a dictionary": lambda net: net.numbers["gain"].__setitem__(0, 2.0),
    "array": lambda net: net.table.fill(2.0),
    "vars": lambda net: vars(original_of(net)).__setitem__("gain", 2.0),
    "__dict__": lambda net: vars(original_of(net)).__setitem__("gain", 2.0),
    "global": lambda net: globals().__setitem__("SCALE", 2.0),
}


@pytest.mark.parametrize("place", CHANGES)
def test_a_value_that_forward_read_is_watched_wherever_it_lies(place: str) -> None:
    model = fractrainify(Holding(place), config=FLOAT, example_inputs=(ROWS,))
    model(ROWS)
    try:
        with pytest.warns(FracTrainWarning, match="without effect on the rewritten model"):
            CHANGES[place](model)
            model(ROWS)
            model.eval()
    finally:
        globals()["SCALE"] = 1.0


@pytest.mark.parametrize("place", [place for place in CHANGES if place.startswith("object")])
def test_a_copy_is_warned_of_changes_of_its_own_objects_alone(place: str) -> None:
    model = copy.deepcopy(fractrainify(Holding(place), config=FLOAT, example_inputs=(ROWS,)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FracTrainWarning)
        model.eval()(ROWS)
    CHANGES[place](model)
    with pytest.warns(FracTrainWarning, match=r"gain was 1\.0"):
        model(ROWS)


def test_a_variable_of_a_closure_is_watched() -> None:
    kind, change = _with_closure()
    model = fractrainify(kind(), config=FLOAT, example_inputs=(ROWS,))
    change(2.0)
    with pytest.warns(FracTrainWarning, match=r"factor.cell_contents was 1.0 when the model was recorded and is 2.0"):
        model.eval()


class Counting(nn.Module):
    codes: Tensor
    loose: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("codes", torch.zeros(3, 2))
        self.register_buffer("loose", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * len(self.codes) * self.loose.shape[0]


@pytest.mark.parametrize("name", ["loose", "codes"])
def test_a_buffer_of_another_size_is_recorded_anew_or_refused(name: str) -> None:
    net = Counting()
    model = fractrainify(net, config=FLOAT, example_inputs=(ROWS,))
    model(ROWS)
    net._buffers[name] = torch.zeros(5, 2)[:, :1].squeeze(-1) if name == "loose" else torch.zeros(5, 2)
    if name == "loose":
        assert torch.equal(model(ROWS), net.layer(ROWS) * 3 * 5)
    else:
        with pytest.raises(ModelError, match="'codes' had shape"):
            model.eval()
