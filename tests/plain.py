"""A network without batch norm, rewritten with gates whose target is below all but the cheapest choices."""

from __future__ import annotations

import torch
from torch import nn

from fractrain_fx import CostTargets, FracModel, GateConfig
from tests.build import made_once, paper
from tests.build import rewritten as rewritten_model
from tests.training.tiny import Plain


def rewrite(model: nn.Module, method: str = "dfq", gate: GateConfig | None = None) -> FracModel:
    targets = {"targets": CostTargets((0.5,))} if method in ("dfq", "fractrain") else {}
    config = paper(method, gate=gate or GateConfig(), **targets)
    return rewritten_model(model, torch.rand(2, 3, 8, 8), config=config).train()


@made_once
def rewritten(method: str = "dfq", gate: GateConfig | None = None) -> FracModel:
    torch.manual_seed(3)
    return rewrite(Plain(), method, gate)
