"""Blocks whose entry holds samples and features in one dimension, as convolutions with kernels of each sample's own."""

from __future__ import annotations

import pytest
import torch
from timm.layers import CondConv2d
from torch import Tensor, nn

from fractrain_fx import Engine, FracConfig, fractrainify


class Conditional(nn.Module):
    """Each sample mixes its own kernel from those of several experts."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.routing = nn.Linear(8, 3)
        self.mixed = CondConv2d(8, 6, 3, padding=1, num_experts=3)
        self.last = nn.Conv2d(6, 4, 1)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = self.mixed(x, self.routing(x.mean((2, 3))).sigmoid()).relu()
        return self.head(self.last(x).relu().mean((2, 3)))


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_a_gate_reads_the_features_of_each_sample(batch: int) -> None:
    torch.manual_seed(0)
    config = FracConfig(method="dfq", targets=(3.0,))
    model = fractrainify(Conditional(), config=config, example_inputs=(torch.randn(2, 3, 8, 8),), check=False)
    engine = Engine(model)
    x = torch.randn(batch, 3, 8, 8)
    engine.loss(model(x).square().sum()).backward()
    gates = {name: p.grad for name, p in model.named_parameters() if name.startswith("frac.gates.")}
    assert any("mixed" in name for name in gates) and all(
        g is not None and bool(g.isfinite().all()) for g in gates.values()
    )
    if batch > 1:  # a sample's choice does not depend on the others
        with torch.no_grad():
            together = model.cost.choice
            model(x[:1])
        for name, choice in model.cost.choice.items():
            assert torch.equal(choice[0], together[name][0])
