"""Where a gate finds the features of a block's entry."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fractrain_fx import Engine, fractrainify


class Codes(nn.Module):
    """Compares each position with a table, as vector quantizers do: samples lie along the second of four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.body = nn.Linear(8, 6), nn.Linear(6, 6)
        self.table, self.last = nn.Parameter(torch.randn(1, 5, 6)), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        entry = self.body(self.first(x))[None].relu()
        return self.last(torch.einsum("hbtd,hcd->hbtc", entry, self.table)[0])


def test_samples_along_the_second_of_four_dimensions_are_not_taken_for_features() -> None:
    model = fractrainify(Codes(), example_inputs=(torch.randn(2, 7, 8),), check=False)
    assert [block.name for block in model.blocks if block.gated] == ["body", "table"]
    for samples in (2, 5):
        Engine(model).loss(model(torch.randn(samples, 7, 8)).square().mean()).backward()
