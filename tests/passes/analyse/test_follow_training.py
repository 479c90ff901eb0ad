"""A model whose two modes run different graphs: evaluation has the gates that training teaches, and no others."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fractrain_fx import Engine, FracConfig, fractrainify
from fractrain_fx.passes import ops_of


class Pooled(nn.Module):
    """In training its first branch sees the mean of the batch, in evaluation each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second, self.head = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = x + self.first(x.mean(0, keepdim=True) if self.training else x)
        x = x + self.second(x.relu())
        return self.head(x)


def test_a_block_that_training_cannot_gate_is_not_gated_in_evaluation() -> None:
    x = torch.randn(4, 6)
    model = fractrainify(Pooled(), config=FracConfig(method="dfq"), example_inputs=(x,), check=False)
    training = {op.name: op for op in model.ops}
    assert training["first"].precision.mode == "scheduled" and training["second"].precision.mode == "gated"
    Engine(model).loss(model(x).square().mean()).backward()
    gates = {name: p for name, p in model.named_parameters() if name.startswith("frac.gates.")}
    assert gates and all(p.grad is not None for p in gates.values())
    model.eval()
    evaluation = {op.name: op for _, op in ops_of(model.graph_module.graph)}
    assert evaluation["first"].precision == training["first"].precision
    assert evaluation["second"].precision.mode == "gated"
    assert model(x).isfinite().all() and len(model.cost.choice) == 1
