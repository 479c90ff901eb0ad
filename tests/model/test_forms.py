"""Calls that differ from the recorded one in more than sizes: the rewritten model computes what the original does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import FracConfig, FracModel, fractrainify

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
    return copy.deepcopy(original), fractrainify(original, config=FLOAT, example_inputs=args, example_kwargs=kwargs)


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
            return self.inner(x, x, x, attn_mask=mask, need_weights=False)[0]  # type: ignore[no-any-return]

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
