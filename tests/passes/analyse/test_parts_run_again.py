"""Parts that stay one node, in runs of the graph with other samples: those that cannot run again are named."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import FracConfig, fractrainify
from fractrain_fx.errors import CaptureError

FLOAT = FracConfig(method="float")


class History(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.last: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        self.last.append(h.detach())
        self.last = self.last[-3:]
        return h + torch.stack(self.last).mean(0)


class Keys(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.keys: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        keys = self.layer(x)
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], 1)
        return keys + self.keys.mean(1, keepdim=True)


class LargestFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.layer(x * float(x.numpy().max()))
        return scaled


@pytest.mark.parametrize(("part", "shape"), [(History, (2, 4)), (Keys, (2, 3, 4))])
def test_a_part_that_keeps_earlier_batches_is_named_with_a_way_out(
    part: type[nn.Module], shape: tuple[int, ...]
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), part(), nn.Linear(4, 4)).eval()
    with pytest.raises(CaptureError, match=rf"module '1' \({part.__name__}\), which stays one node.*begin anew"):
        fractrainify(model, config=FLOAT, example_inputs=(torch.randn(shape),))


def test_a_part_may_turn_the_input_into_an_array_of_numpy() -> None:
    x = torch.linspace(0, 1, 8).reshape(2, 4)
    model = nn.Sequential(LargestFirst(), nn.Linear(4, 4))
    expected = model(x)
    torch.testing.assert_close(fractrainify(model, config=FLOAT, example_inputs=(x,))(x), expected)
