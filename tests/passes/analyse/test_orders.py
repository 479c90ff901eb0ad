"""A controller's state goes on by row, so only blocks with the samples in the order of the first gate get one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import FracConfig
from fractrain_fx.passes.graph.facts import ops_of
from tests.build import rewritten

Step = Callable[[Tensor, Callable[[Tensor], Tensor], Tensor], Tensor]


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.a(x).relu())


class Net(nn.Module):
    """Three blocks; what happens around the second one is given."""

    def __init__(self, step: Step, before: Step = lambda x, body, _: body(x)) -> None:
        super().__init__()
        self.step, self.before = step, before
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 2)
        self.b1, self.b2, self.b3 = Block(), Block(), Block()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = self.b1(self.before(x, self.stem, lengths))
        return self.head(self.b3(self.step(x, self.b2, lengths)).mean(1))


def sorted_and_back(x: Tensor, body: Callable[[Tensor], Tensor], lengths: Tensor) -> Tensor:
    order = lengths.argsort()
    return body(x[order])[order.argsort()]


def sorted_by_length(x: Tensor, body: Callable[[Tensor], Tensor], lengths: Tensor) -> Tensor:
    lengths, order = lengths.sort(descending=True)
    x = body(x.index_select(0, order)) * lengths[:, None, None]
    _, back = order.sort()
    return x[back]


def modes(step: Step, **more: Step) -> list[str]:
    torch.manual_seed(0)
    config = FracConfig.paper(targets=(1.5, 2.0, 2.5, 3.0))
    inputs = (torch.randn(3, 5, 8), torch.tensor([4, 4, 4]))
    model = rewritten(Net(step, **more), *inputs, config=config)
    found = {op.name: op.precision for _, op in ops_of(model.graph_module.graph)}
    for name in ("b2.a", "b3.a"):
        assert found[name].mode == "gated" or "in mixed order" in found[name].reason
    return [found[f"{block}.{layer}"].mode[0] for block in ("b1", "b2", "b3") for layer in "ab"]


@pytest.mark.parametrize(
    "step",
    [
        lambda x, body, _: body(x[torch.arange(x.shape[0])]),
        lambda x, body, _: body(x.flip(1).roll((1, 2), dims=(1, 2))),
        lambda x, body, _: body(x[:, torch.tensor([4, 1, 0])]),
        lambda x, body, lengths: body(x.gather(1, lengths[:, None, None].expand(-1, 1, 8))),
    ],
)
def test_calls_that_leave_samples_in_place_leave_gates(step: Step) -> None:
    assert modes(step) == ["g"] * 6


@pytest.mark.parametrize(
    "step",
    [
        lambda x, body, lengths: body(x[lengths.argsort()]),
        lambda x, body, lengths: body(x[lengths.argsort(), :1]),
        lambda x, body, lengths: body(x.index_select(0, lengths.argsort())),
        lambda x, body, _: body(x.flip(0)),
        lambda x, body, _: body(x.flip(-1, 0)),
        lambda x, body, _: body(x.roll(1, 0)),
        lambda x, body, _: body(x.sort(dim=0)[0]),
        lambda x, body, _: body(x + x[torch.randperm(x.shape[0])]),
        lambda x, body, lengths: body(x[lengths.argsort()])[lengths.argsort()],
    ],
)
def test_blocks_in_another_order_than_the_first_follow_the_stage(step: Step) -> None:
    assert modes(step) == ["g", "g", "s", "s", "s", "s"]


@pytest.mark.parametrize("step", [sorted_and_back, sorted_by_length])
def test_gates_go_on_where_the_first_order_is_back(step: Step) -> None:
    assert modes(step) == ["g", "g", "s", "s", "g", "g"]


def test_an_order_that_all_blocks_share_leaves_all_gates() -> None:
    assert modes(lambda x, body, _: body(x), before=lambda x, body, lengths: body(x)[lengths.argsort()]) == ["g"] * 6
