"""What Python code sees of input tensors besides types, sizes and values: classes, attributes, which are the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import FracConfig, FracModel, RunConfig
from fractrain_fx.errors import InputError
from tests.build import rewritten

FLOAT = FracConfig(method="float", run=RunConfig(recordings=20))


class Pixels(Tensor):
    """A tensor of another class."""


class Attends(nn.Module):
    """Treats its two inputs by what a function says of them."""

    def __init__(self, factor: Callable[[Tensor, Tensor], float]) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self._factor = factor

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return torch.add(self.one(x) * self._factor(x, context), self.other(context))


def tagged(x: Tensor, **attributes: Any) -> Tensor:
    copied = x.clone()
    vars(copied).update(attributes)
    return copied


X, Y = torch.randn(2, 4), torch.randn(2, 4)
TABLE = torch.tensor([2.0])
LOOKS: dict[str, tuple[Callable[[Tensor, Tensor], float], tuple[Tensor, Tensor]]] = {
    "one tensor twice": (lambda x, y: 3.0 if y is x else 1.0, (X, X)),
    "an attribute": (lambda x, y: 3.0 if hasattr(x, "prompt") else 1.0, (tagged(X, prompt=True), Y)),
    "the value of an attribute": (lambda x, y: getattr(x, "scale", 1.0), (tagged(X, scale=2.5), Y)),
    "a tensor as attribute": (lambda x, y: getattr(x, "table", 1.0), (tagged(X, table=TABLE), Y)),
    "a class": (lambda x, y: 3.0 if isinstance(x, Pixels) else 1.0, (X.as_subclass(Pixels), Y)),
}


def pair(function: Callable[[Tensor, Tensor], float], *example: Tensor) -> tuple[nn.Module, FracModel]:
    net = Attends(function)
    return copy.deepcopy(net), rewritten(net, *example, config=FLOAT, check=True)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("as_example", [False, True])
@pytest.mark.parametrize("name", LOOKS)
def test_calls_that_python_code_tells_apart_get_recordings_of_their_own(
    name: str, as_example: bool, train: bool
) -> None:
    function, special = LOOKS[name]
    reference, model = pair(function, *(special if as_example else (X, Y)))
    reference.train(train), model.train(train)
    for inputs in 2 * ((X, Y), special, (X.clone(), Y.clone()), tuple(special)):
        assert torch.equal(reference(*inputs), model(*inputs))


def test_another_value_of_an_attribute_is_another_call() -> None:
    reference, model = pair(lambda x, y: getattr(x, "scale", 1.0), X, Y)
    for scale in (2.0, 2, 3.0, True, 2.0):
        x = tagged(X, scale=scale)
        assert torch.equal(reference(x, Y), model(x, Y))


def test_a_model_that_does_not_ask_is_recorded_once(caplog: pytest.LogCaptureFixture) -> None:
    reference, model = pair(lambda x, y: 1.0, X, Y)
    for _, inputs in LOOKS.values():
        assert torch.equal(reference(*inputs), model(*inputs))
    assert "recorded again" not in caplog.text


def test_example_inputs_that_are_one_tensor_stay_two_inputs() -> None:
    reference, model = pair(lambda x, y: 1.0, X, X)
    assert torch.equal(reference(X, Y), model(X, Y))
    names = [node.name for node in model.graph.nodes if node.op == "placeholder"]
    assert names == ["x", "context"]


FACTS: dict[str, tuple[Callable[[Tensor, Tensor], float], Tensor]] = {
    "_base": (lambda x, y: 1.0 if x._base is None else 3.0, torch.randn(5, 4)[:2]),
    "_is_view": (lambda x, y: 3.0 if x._is_view() else 1.0, torch.randn(5, 4)[:2]),
    "storage_offset": (lambda x, y: float(x.storage_offset()), torch.randn(5, 4)[2:4]),
    "the offset of a part": (lambda x, y: float(x[:, 1:].storage_offset()), torch.randn(5, 4)[2:4]),
}


@pytest.mark.parametrize("name", FACTS)
def test_a_question_about_memory_is_answered_as_recorded_or_refused(name: str) -> None:
    function, other = FACTS[name]
    reference, model = pair(function, X, Y)
    assert torch.equal(reference(X, Y), model(X, Y))
    with pytest.raises(InputError, match=r"tensor 1 of the inputs with \w+ .*test_looks\.py"):
        model(other, Y)


@pytest.mark.long
def test_a_compiled_model_tells_them_apart_too() -> None:
    function, same = LOOKS["one tensor twice"]
    reference, model = pair(function, X, Y)
    model.compile(fullgraph=True)
    for inputs in 2 * ((X, Y), same):
        torch.testing.assert_close(model(*inputs), reference(*inputs))


@pytest.mark.long
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_model_runs_in_eager_mode_if_attributes_decide(fullgraph: bool) -> None:
    function, special = LOOKS["an attribute"]
    reference, model = pair(function, X, Y)
    model.compile(fullgraph=fullgraph)
    with pytest.raises(Exception, match="attributes of input tensors") if fullgraph else nullcontext():
        torch.testing.assert_close(model(*special), reference(*special))
