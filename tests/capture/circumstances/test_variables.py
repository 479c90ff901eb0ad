"""Values that a forward changes or reads outside of its modules: in files, classes, closures; and in containers."""

from __future__ import annotations

import copy
import itertools
import re
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import Tensor, nn

from fractrain_fx import FracModel, fractrainify
from fractrain_fx.capture import record
from fractrain_fx.errors import CaptureError, FracTrainWarning
from tests.capture.circumstances import models
from tests.capture.circumstances.models import FLOAT, ROWS, original_of


class Held(nn.Module):
    """Counts its calls in a container of its own; the count decides from the call ``late`` on."""

    def __init__(self, counts: Any, late: int) -> None:
        super().__init__()
        self.layer, self.counts, self.late = nn.Linear(4, 4), counts, late

    def forward(self, x: Tensor) -> Tensor:
        self.counts["n"] += 1
        return self.layer(x) * max(1, self.counts["n"] - self.late)


@pytest.mark.parametrize(
    "counts", [Counter(), defaultdict(int), OrderedDict(n=0)], ids=lambda each: type(each).__name__
)
def test_a_count_in_a_container_of_a_derived_class_is_not_left_out_of_the_graph(counts: Any) -> None:
    with pytest.raises(CaptureError, match=r"changes counts from call to call"):
        record(Held(counts, late=0), (ROWS,))


def test_a_count_in_a_dictionary_that_decides_later_is_worth_a_note() -> None:
    (note,) = record(Held({"n": 0}, late=100), (ROWS,)).python.notes
    assert "changes values in counts" in note and "test_variables.py:" in note


def test_a_container_of_a_derived_class_is_watched() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.options = nn.Linear(4, 4), OrderedDict(gain=1.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.options["gain"]

    model = fractrainify(Reads(), config=FLOAT, example_inputs=(ROWS,))
    original_of(model).options["gain"] = 2.0
    with pytest.warns(FracTrainWarning, match="options was"):
        model(ROWS)


TOTAL, TABLE = 0, {"n": 0}


class Totals:
    """An ordinary class; ``count`` belongs to the class, ``n`` to an object."""

    __slots__ = ("n",)
    count = 0

    def __init__(self) -> None:
        self.n = 0

    def step(self) -> int:
        self.n += 1
        return self.n


KEPT = Totals()


def _of_the_file() -> int:
    global TOTAL
    TOTAL += 1
    return TOTAL


def _of_the_class() -> int:
    Totals.count += 1
    return Totals.count


def _in_a_table() -> int:
    TABLE["n"] += 1
    return TABLE["n"]


def _of_the_function() -> int:
    _COUNTED.n += 1
    return int(_COUNTED.n)


def _of_an_object() -> int:
    return KEPT.step()


def _in_a_default(counts: list[int] = [0]) -> int:  # noqa: B006
    counts[0] += 1
    return counts[0]


def _in_a_closure() -> Callable[[], int]:
    n = 0

    def count() -> int:
        nonlocal n
        n += 1
        return n

    return count


_closed = _in_a_closure()
_COUNTED: Any = _of_the_function
_COUNTED.n = 0


def _of_a_closure() -> int:
    return _closed()


class Counting(nn.Module):
    """Counts its calls outside of itself; the count decides after a thousand calls."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.layer, self.place, self.totals, self.count = nn.Linear(4, 4), place, Totals(), _in_a_closure()

    def total(self) -> int:
        return _of_the_file()

    def forward(self, x: Tensor) -> Tensor:
        match self.place:
            case "a file":
                n = _of_the_file()
            case "a file, by a method":
                n = self.total()
            case "a class":
                n = _of_the_class()
            case "a table":
                n = _in_a_table()
            case "a function":
                n = _of_the_function()
            case "an object":
                n = _of_an_object()
            case "a default":
                n = _in_a_default()
            case "a closure":
                n = _of_a_closure()
            case "a closure of its own":
                n = self.count()
            case _:
                n = self.totals.step()
        return self.layer(x) * (1 if n < 1000 else 2)


PLACES = {
    "a file": "TOTAL",
    "a class": "Totals.count",
    "a table": "TABLE",
    "a function": r"_COUNTED\.n",
    "an object": r"KEPT\.n",
    "a default": "_in_a_default.__defaults__",
    "a closure": "count.n.cell_contents",
    "a closure of its own": "count.n.cell_contents",
    "an object with slots": r"totals\.n",
    "a file, by a method": "TOTAL",
}


@pytest.mark.parametrize("place", PLACES)
def test_a_count_outside_of_the_model_that_decides_later_is_worth_a_note(place: str) -> None:
    notes = [note for note in record(Counting(place), (ROWS,)).python.notes if "from call to call" in note]
    assert len(notes) == 1 and re.search(PLACES[place], notes[0])


class Reading(nn.Module):
    """Reads values outside of itself."""

    scale = 1

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.totals = nn.Linear(4, 4), Totals()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * type(self).scale * (1 + self.totals.n + _of_a_function())


def _of_a_function() -> int:
    return models.NUMBER + int(_READ.n)


_READ: Any = _of_a_function
_READ.n = 0

CHANGES: dict[str, tuple[Callable[[FracModel], Any], Callable[[FracModel], Any]]] = {
    r"Reading\.scale was 1": (lambda _: setattr(Reading, "scale", 3), lambda _: setattr(Reading, "scale", 1)),
    r"totals\.n was 0": (lambda net: setattr(original_of(net).totals, "n", 3), lambda _: None),
    r"_READ\.n was 0": (lambda _: setattr(_READ, "n", 3), lambda _: setattr(_READ, "n", 0)),
    r"models\.NUMBER was 0": (lambda _: setattr(models, "NUMBER", 3), lambda _: setattr(models, "NUMBER", 0)),
}


@pytest.mark.parametrize("words", CHANGES)
def test_a_value_outside_of_the_model_that_forward_read_is_watched(words: str) -> None:
    model = fractrainify(Reading(), config=FLOAT, example_inputs=(ROWS,))
    change, back = CHANGES[words]
    change(model)
    try:
        with pytest.warns(FracTrainWarning, match=words):
            model.eval()
    finally:
        back(model)


totals = 0
"""A variable of this file by the name of an attribute that ``Reading`` reads."""


def test_a_variable_that_shares_an_attributes_name_is_not_watched() -> None:
    model = fractrainify(Reading(), config=FLOAT, example_inputs=(ROWS,))
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setitem(globals(), "totals", 3)
        warnings.simplefilter("error", FracTrainWarning)
        model.eval()


def test_a_copy_watches_slots_of_its_own_objects() -> None:
    model = copy.deepcopy(fractrainify(Reading(), config=FLOAT, example_inputs=(ROWS,)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FracTrainWarning)
        model.eval()
    original_of(model).totals.n = 3
    with pytest.warns(FracTrainWarning, match=r"totals\.n was 0"):
        model.train()


class Taking(nn.Module):
    """Takes a number from an iterator at each call, which decides after a thousand calls."""

    def __init__(self, numbers: Iterator[int]) -> None:
        super().__init__()
        self.layer, self.numbers = nn.Linear(4, 4), numbers

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (1 if next(self.numbers) < 1000 else 2)


@pytest.mark.parametrize("numbers", [itertools.count(), (n for n in range(2000))], ids=["count", "generator"])
def test_an_iterator_that_forward_takes_items_from_is_worth_a_note(numbers: Iterator[int]) -> None:
    (note,) = record(Taking(numbers), (ROWS,)).python.notes
    assert "numbers" in note and "gives each item once" in note
