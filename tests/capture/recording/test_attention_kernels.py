"""A forward that chooses the kernels of attention, and regions that an error ends before their end."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fractrain_fx import FracConfig, FracModel
from fractrain_fx.errors import InputError
from tests.build import rewritten

FLOAT = FracConfig(method="float")
BY_PRIORITY = partial(sdpa_kernel, [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True)
CHOICES: dict[str, Callable[[], Any]] = {"math": partial(sdpa_kernel, SDPBackend.MATH), "by priority": BY_PRIORITY}


class Attention(nn.Module):
    def __init__(self, choice: Callable[[], Any]) -> None:
        super().__init__()
        self.project, self.last = nn.Linear(8, 24), nn.Linear(8, 8)
        self._choice = choice

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, 2, 4)).transpose(1, 3).unbind(2)
        with self._choice():
            mixed = F.scaled_dot_product_attention(query, key, value)
        return x + self.last(mixed.transpose(1, 2).flatten(2))


def kernels() -> list[SDPBackend]:
    """The kernels that attention may use now, first those that it prefers."""
    found: list[SDPBackend] = torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)
    return found


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Torch itself does not put priorities back where other kernels were switched off."""
    before = kernels()
    yield
    torch.nn.attention._sdpa_kernel(before, set_priority=True)


def names(model: FracModel) -> list[str]:
    return [node.name for node in model.graph_module.graph.nodes]


@pytest.mark.parametrize("choice", CHOICES)
def test_a_graph_chooses_the_kernels_of_attention_as_forward_does(choice: str) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(*(Attention(CHOICES[choice]) for _ in range(2))), torch.randn(3, 5, 8)
    before = kernels()
    model = rewritten(copy.deepcopy(net), x, config=FLOAT)
    assert names(model).count("enter_attention") == names(model).count("leave_attention") == 1
    assert "enter_attention_1" in names(model)
    for training in (True, False):
        for part in (net, model):
            part.train(training)
        assert torch.equal(model(x), net(x))
        assert kernels() == before
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.equal(model(x), net(x))
        assert kernels() == [SDPBackend.MATH]


def test_products_of_attention_have_no_kernels_to_choose() -> None:
    model = rewritten(Attention(CHOICES["math"]), torch.randn(3, 5, 8), method="static")
    assert "enter_attention" not in names(model)
    floating = rewritten(Attention(CHOICES["math"]), torch.randn(3, 5, 8), method="static", attention="float")
    assert "enter_attention" in names(floating)


def state() -> tuple[bool, bool, int, list[SDPBackend]]:
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), nesting, kernels()


class Ends(nn.Module):
    """A block that ends in a region."""

    def __init__(self, region: Callable[[], Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self._region = region

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        h = self.first(x)
        with self._region():
            y = F.scaled_dot_product_attention(*(self.last(h @ other)[None, None] for _ in range(3)))[0, 0]
        return x + y.to(x.dtype)


REGIONS: dict[str, Callable[[], Any]] = {
    "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
    "gradients": torch.no_grad,
    "kernels": CHOICES["math"],
}


@pytest.mark.parametrize("region", REGIONS)
def test_a_call_that_fails_within_a_region_leaves_it(region: str) -> None:
    before = state()
    model = rewritten(Ends(REGIONS[region]), torch.randn(3, 8), torch.randn(8, 8), config=FLOAT)
    for _ in range(2):
        with pytest.raises(InputError, match="cannot be multiplied"):
            model(torch.randn(3, 8), torch.randn(7, 8))
        assert state() == before


class Chain(nn.Module):
    def __init__(self, region: Callable[[], Any]) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Ends(region) for _ in range(3)), nn.Linear(8, 2)

    def forward(self, x: Tensor, other: Tensor) -> Any:
        for block in self.blocks:
            x = block(x, other)
        return self.head(x)


@pytest.mark.parametrize("region", ["autocast", "kernels"])
def test_a_block_that_is_computed_again_up_to_a_region_leaves_it(region: str) -> None:
    before = state()
    x, other = torch.randn(3, 8), torch.randn(8, 8)
    model = rewritten(Chain(REGIONS[region]), x, other, config=FLOAT)
    model.gradient_checkpointing_enable()
    model(x, other).sum().backward()
    assert state() == before
