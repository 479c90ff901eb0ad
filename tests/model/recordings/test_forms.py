"""Calls that differ from the recorded one in more than sizes: the rewritten model computes what the original does."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from fractrain_fx import FracConfig, FracModel
from fractrain_fx.errors import CaptureError, FracTrainWarning, InputError
from tests.build import rewritten as build_rewritten

FLOAT = FracConfig(method="float")


class Layers(nn.Module):
    """Computes with two layers whatever ``compute`` says."""

    def __init__(self, compute: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.compute = compute
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Any, y: Any = None) -> Any:
        return self.last(self.compute(self.first, x, y))


def rewritten(original: nn.Module, *args: Any, **kwargs: Any) -> tuple[nn.Module, FracModel]:
    """A copy of the original, and the rewritten model."""
    return copy.deepcopy(original), build_rewritten(original, *args, keywords=kwargs, config=FLOAT, check=True)


def recordings(model: FracModel) -> int:
    return len(list(model._state.variants))


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
BYTES = torch.arange(32, dtype=torch.uint8).view(4, 8)
CAUSAL = torch.ones(4, 4, dtype=torch.bool).triu(1)


# Types of tensors


def test_images_of_bytes_and_of_floats_take_the_two_ways_of_a_branch() -> None:
    def compute(first: nn.Module, x: Tensor, y: None) -> Tensor:
        return first(x.float() / 255 if x.dtype == torch.uint8 else x)

    original, model = rewritten(Layers(compute), X)
    assert torch.equal(model(BYTES), original(BYTES))
    assert torch.equal(model(X), original(X)) and recordings(model) == 2


def test_a_mask_of_booleans_is_not_added_like_one_of_floats() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.inner(x, x, x, attn_mask=mask, need_weights=False)[0]

    x = torch.randn(2, 4, 8)
    original, model = rewritten(Attention(), x, torch.zeros(4, 4).masked_fill(CAUSAL, float("-inf")))
    assert torch.equal(model(x, CAUSAL), original(x, CAUSAL))


@pytest.mark.parametrize("read", [lambda x: torch.finfo(x.dtype).max / 1e38, lambda x: float(x.element_size())])
def test_a_constant_made_from_the_type_of_an_input_is_made_again_for_another_type(read: Callable[..., float]) -> None:
    original, model = rewritten(Layers(lambda first, x, y: first(x.float()) * read(x)), X)
    half = X.half()
    assert torch.equal(model(half), original(half))
    assert torch.equal(model(X), original(X)) and recordings(model) == 2


def test_another_precision_needs_no_recording_if_no_code_reads_the_type() -> None:
    original, model = rewritten(Layers(lambda first, x, y: first(x.float() + y.float()[:, None])), X, torch.arange(4))
    for x, y in ((X.half(), torch.arange(4)), (X.double(), torch.arange(4, dtype=torch.int32))):
        assert torch.equal(model(x, y), original(x, y))
    assert recordings(model) == 1


# The order of names


def first_and_last(first: nn.Module, x: dict[str, Tensor], y: None) -> Tensor:
    early, late = x.values()
    return first(early) + 2 * late


def test_code_may_take_the_values_of_a_dictionary_in_order() -> None:
    original, model = rewritten(Layers(first_and_last), {"p": X, "q": X + 1})
    swapped = {"q": X + 1, "p": X}
    assert torch.equal(model(swapped), original(swapped))


def test_the_order_of_named_arguments_counts_only_where_forward_takes_a_dictionary_of_them() -> None:
    class Named(Layers):
        def forward(self, **x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)

    original, model = rewritten(Named(first_and_last), p=X, q=X + 1)
    assert torch.equal(model(q=X + 1, p=X), original(q=X + 1, p=X)) and recordings(model) == 2
    original, model = rewritten(Layers(lambda first, x, y: first(x) + 2 * y), x=X, y=X + 1)
    assert torch.equal(model(y=X + 1, x=X), original(y=X + 1, x=X)) and recordings(model) == 1


# Constants


def test_a_constant_that_is_changed_in_place_is_another_constant() -> None:
    original, model = rewritten(Layers(lambda first, x, y: first(x) * y["k"][0]), X, options := {"k": [2.0]})
    options["k"][0] = 5.0
    assert torch.equal(model(X, options), original(X, options))
    assert torch.equal(model(X, {"k": [2.0]}), original(X, {"k": [2.0]})) and recordings(model) == 2
    assert torch.equal(model(X, {"k": [2]}), original(X, {"k": [2]})) and recordings(model) == 3


class Graph:
    """Cannot be copied, has itself as a part, and holds a tensor."""

    def __init__(self) -> None:
        self.weight, self.parts = torch.ones(8), [self]

    def __deepcopy__(self, memo: Any) -> None:
        raise TypeError

    __copy__ = __reduce_ex__ = __deepcopy__  # type: ignore[assignment]


@pytest.mark.parametrize("change", [lambda x: setattr(x, "weight", torch.zeros(8)), lambda x: x.weight.fill_(3.0)])
def test_an_object_that_holds_a_tensor_is_compared_by_it(change: Callable[[Graph], None]) -> None:
    graph = Graph()
    original, model = rewritten(Layers(lambda first, x, y: first(x) * y.weight), X, graph)
    assert torch.equal(model(X, graph), original(X, graph)) and recordings(model) == 1
    change(graph)
    assert torch.equal(model(X, graph), original(X, graph)) and recordings(model) == 2


# Arguments that forward changes


class Kept:
    hidden: Tensor | None = None


@pytest.mark.parametrize(
    ("change", "make"),
    [
        (lambda kept, h: kept.__setitem__("h", h), dict),
        (lambda kept, h: kept.append(h), list),
        (lambda kept, h: kept[0].append(h), lambda: ([],)),
        (lambda kept, h: setattr(kept, "hidden", h), Kept),
        (lambda kept, h: kept.__setitem__("x", h), lambda: {"x": X}),
    ],
)
def test_a_forward_that_fills_its_argument_is_refused(change: Callable[..., None], make: Callable[[], Any]) -> None:
    def compute(first: nn.Module, x: Tensor, y: Any) -> Tensor:
        h: Tensor = first(x)
        if y is not None:
            change(y, h)
        return h

    with pytest.raises(CaptureError, match="changes its argument 'y'"):
        rewritten(Layers(compute), X, make())
    _, model = rewritten(Layers(compute), X)
    with pytest.raises(InputError, match="changes its argument 'y'"):
        model(X, make())


def test_a_dictionary_that_forward_fills_and_returns_is_worth_a_warning() -> None:
    class Filling(Layers):
        def forward(self, x: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
            x["y"] = super().forward(x["x"])
            return x

    with pytest.warns(FracTrainWarning, match="changes its argument 'x'.*only returns it"):
        original, model = rewritten(Filling(lambda first, x, y: first(x)), {"x": X})
    assert torch.equal(model({"x": X})["y"], original({"x": X})["y"])


# Containers of tensors


@dataclass
class Batch:
    last_hidden_state: Tensor


@pytest.mark.parametrize(
    "make",
    [
        lambda x: OrderedDict(last_hidden_state=x),
        lambda x: defaultdict(list, last_hidden_state=x),
        lambda x: BaseModelOutput(last_hidden_state=x),
        lambda x: BatchEncoding({"last_hidden_state": x}),
        Batch,
    ],
)
def test_tensors_may_come_in_any_mapping_or_dataclass(make: Callable[[Tensor], Any]) -> None:
    def compute(first: nn.Module, x: Any, y: None) -> Tensor:
        return first(x.last_hidden_state if isinstance(x, Batch) else x["last_hidden_state"])

    original, model = rewritten(Layers(compute), make(X))
    assert torch.equal(model(make(X[:3] + 1)), original(make(X[:3] + 1))) and recordings(model) == 1


def test_arrays_are_refused_with_what_to_pass() -> None:
    def compute(first: nn.Module, x: Tensor, y: Any) -> Tensor:
        return first(x if y is None else x + torch.from_numpy(y["a"]))

    given, words = {"a": X.numpy()}, "'y' holds an array of numpy.*pass a tensor"
    with pytest.raises(InputError, match=words):
        rewritten(Layers(compute), X, given)
    with pytest.raises(InputError, match=words):
        rewritten(Layers(compute), X)[1](X, given)
