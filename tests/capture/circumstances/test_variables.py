"""Values that a forward changes or reads outside of its modules' attributes: in containers, files, classes, closures."""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from fractrain_fx import FracModel, fractrainify
from fractrain_fx.capture import record
from fractrain_fx.errors import CaptureError, FracTrainWarning
from tests.capture.circumstances.models import FLOAT, ROWS, original_of


class Held(nn.Module):
    """Counts its calls in a container of its own; the count decides from the call ``late`` on."""

    def __init__(self, counts: Any, late: int) -> None:
        super().__init__()
        self.layer, self.counts, self.late = nn.Linear(4, 4), counts, late

    def forward(self, x: Tensor) -> Tensor:
        self.counts["n"] += 1
        return self.layer(x) * max(1, self.counts["n"] - self.late)


@pytest.mark.parametrize("counts", [Counter(), defaultdict(int), OrderedDict(n=0)], ids=lambda each: type(each).__name__)
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
