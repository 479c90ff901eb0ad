"""The smallest image model, rewritten, with a cost target that its gates do not meet at first."""

from __future__ import annotations

import torch
from torch import nn

from fractrain_fx import CostTargets, FracConfig, FracModel, GateConfig, fractrainify
from tests.training.tiny import Plain


def rewritten(method: str = "dfq", model: nn.Module | None = None, gate: GateConfig | None = None) -> FracModel:
    torch.manual_seed(3)
    targets = {"targets": CostTargets((0.5,))} if method in ("dfq", "fractrain") else {}
    config = FracConfig(method=method, gate=gate or GateConfig(), **targets)  # type: ignore[arg-type]
    return fractrainify(model or Plain(), config=config, example_inputs=(torch.rand(2, 3, 8, 8),)).train()
