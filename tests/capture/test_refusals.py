"""Every refusal names the file and the line of the model's code that it is about."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fractrain_fx.capture import record
from fractrain_fx.capture.inputs.wrappers import unwrapped
from fractrain_fx.errors import CaptureError, InputError

HERE = Path(__file__).name
COUNTED = [0.0]


class Base(nn.Module):
    """Its ``compute`` is all that a case changes; ``forward`` is where it is refused."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.calls, self.compute = 0, compute

    def forward(self, x: Tensor) -> Any:
        return self.compute(self, self.two(self.one(x).relu()))


def reads_values(model: Base, x: Tensor) -> Tensor:
    return x * 2 if x.sum().item() > 0 else model.two(x)  # refused


def draws(model: Base, x: Tensor) -> Tensor:
    return x * float(np.random.rand())  # refused


def counts(model: Base, x: Tensor) -> Tensor:
    model.calls += 1  # refused
    return x * model.calls


def counts_globally(model: Base, x: Tensor) -> Tensor:
    COUNTED[0] += 1
    return x * COUNTED[0]


def returns_an_object(model: Base, x: Tensor) -> Any:
    return {"x": {x}}


def nests(model: Base, x: Tensor) -> Any:
    rows = torch.nested.nested_tensor(list(x.unbind()))
    return torch.nested.to_padded_tensor(rows, 0.0)


def rejects(model: Base, x: Tensor) -> Tensor:
    raise ValueError("no")  # refused


def line_of(function: Callable[..., Any]) -> int:
    """The line in ``function`` that is marked, or the first line of ``forward``."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    start = function.__code__.co_firstlineno
    marked = [number for number, line in enumerate(lines, 1) if line.endswith("# refused") and number > start]
    own = [number for number in marked if number <= start + 3]
    return own[0] if own else Base.forward.__code__.co_firstlineno


@pytest.mark.parametrize("compute", [reads_values, draws, counts, counts_globally, returns_an_object, nests, rejects])
def test_the_line_is_that_of_the_model(compute: Callable[..., Any]) -> None:
    error = InputError if compute is rejects else CaptureError
    with pytest.raises(error, match=rf"{re.escape(HERE)}:{line_of(compute)}\b"):
        record(Base(compute), (torch.randn(2, 4),))


def test_values_on_the_meta_device_name_the_line() -> None:
    with pytest.raises(CaptureError, match=rf"{re.escape(HERE)}:{line_of(reads_values)}\b"):
        record(Base(reads_values).to("meta"), (torch.randn(2, 4),))


def half_meta() -> nn.Module:
    model = Base(counts)
    model.two.to("meta")
    return model


def lazy() -> nn.Module:
    model = Base(counts)
    model.two = nn.LazyLinear(4)
    return model


def taken() -> nn.Module:
    model = Base(counts)
    model.frac = nn.Linear(1, 1)
    return model


@pytest.mark.parametrize("make", [half_meta, lazy, taken])
def test_models_that_cannot_be_recorded_at_all_name_their_forward(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(CaptureError, match=rf"Base \(.*{re.escape(HERE)}:{Base.forward.__code__.co_firstlineno}\)"):
        record(unwrapped(make()), (torch.randn(2, 4),))


def test_a_tensor_computed_from_parameters_before_forward_is_named_as_such() -> None:
    model = Base(lambda model, x: x @ model.transposed)
    model.transposed = model.two.weight.t()
    with pytest.raises(CaptureError, match="was computed from parameters before forward: compute it in forward"):
        record(model, (torch.randn(2, 4),))
