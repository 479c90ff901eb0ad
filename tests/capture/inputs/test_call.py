"""A later call must look like the recorded one: what differs is named, with what to do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx.capture import CallSpec, record
from fractrain_fx.errors import InputError
from tests.build import rewritten


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(
        self, x: Tensor, bias: Tensor | None = None, scale: float = 1.0, use_cache: bool | None = None, **more: Any
    ) -> Tensor:
        y = self.linear(x) * scale
        return y if bias is None else y + bias


X = torch.ones(2, 4)


def spec(**kwargs: Any) -> CallSpec:
    return record(Scaled(), (X,), kwargs, check=False).call


def test_tensors_become_placeholders_by_position_or_by_name() -> None:
    call = spec(bias=X)
    assert call.placeholders == ("x", "bias")
    assert [value is X for value in call.bind((X, X), {})] == [True, True]
    assert [value is X for value in call.bind((), {"bias": X, "x": X})] == [True, True]


@pytest.mark.parametrize(
    ("recorded", "args", "kwargs", "words"),
    [
        ({}, (), {}, "'x' is missing"),
        ({"bias": X}, (X,), {}, "'bias' is missing"),
        ({}, (X, X), {}, "'bias' is a tensor, but the graph was recorded with None"),
        ({"scale": 2.0}, (X,), {"scale": 3.0}, "'scale' is 3.0, but the graph was recorded with 2.0"),
        ({"scale": 2.0}, (X,), {}, "'scale' is missing"),
        ({}, (X,), {"scale": 3.0}, "'scale' is 3.0"),
        ({}, (X,), {"other": 1}, "'other' is 1"),
        ({}, (X,), {"x": X}, "'x' is passed twice"),
        ({}, (X, None, 1.0, None, 5), {}, "5 positional arguments"),
        ({}, (X,), {"use_cache": True}, "'use_cache' is True"),
        ({}, ([X],), {}, r"'x' is \[a tensor\]"),
    ],
)
def test_calls_unlike_the_recorded_one_are_refused(
    recorded: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        spec(**recorded).bind(args, kwargs)


def test_defaults_may_be_written_out() -> None:
    assert len(spec().bind((X, None, 1.0), {"use_cache": False})) == 1


def test_inputs_that_do_not_fit_forward_are_refused() -> None:
    with pytest.raises(InputError, match="do not fit Scaled"):
        record(Scaled(), (), {})


def test_binding_compiles_into_the_callers_graph() -> None:
    model = Scaled()
    recording = record(model, (X,), {"scale": 2.0})

    @torch.compile(fullgraph=True, backend="eager")
    def call(*args: Any, **kwargs: Any) -> Tensor:
        return recording.train(*recording.call.bind(args, kwargs))

    assert torch.equal(call(X, scale=2.0), model(X, scale=2.0))


@dataclasses.dataclass
class Gains:
    weight: Tensor
    factor: float = 2.0


ONES = torch.ones(4)
HOLDS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Any]]] = {
    "alone": (lambda w: w, lambda given: given),
    "in a tuple": (lambda w: (w, 1.0), lambda given: given[0] * given[1]),
    "in a dictionary": (lambda w: {"gains": [w]}, lambda given: given["gains"][0]),
    "in a dataclass": (Gains, lambda given: given.weight * given.factor),
}


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("held", HOLDS)
def test_a_tensor_in_the_place_of_a_default_counts(held: str, by_name: bool) -> None:
    hold, gain = HOLDS[held]

    class Gained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, w: Any = hold(ONES)) -> Tensor:  # noqa: B008 (the case of this test)
            return self.last(self.first(x).relu()) * gain(w)

    plain = Gained()
    model = rewritten(plain, X, method="float", check=True)
    for training in (False, True):
        model.train(training)
        for w in (ONES, torch.full((4,), 3.0), torch.full((4,), 5.0)):
            args, kwargs = ((X,), {"w": hold(w)}) if by_name else ((X, hold(w)), {})
            assert torch.equal(model(X), plain(X))
            assert torch.equal(model(*args, **kwargs), plain(*args, **kwargs))


def test_the_default_itself_may_be_passed_and_needs_no_other_recording() -> None:
    class Gained(Scaled):
        def forward(self, x: Tensor, bias: Tensor = ONES) -> Tensor:  # type: ignore[override]
            return super().forward(x, bias)

    call = record(Gained(), (X,)).call
    assert len(call.bind((X, ONES), {})) == 1
    with pytest.raises(InputError, match="'bias' is a tensor, but the graph was recorded with a tensor that is a"):
        call.bind((X, torch.ones(4)), {})
