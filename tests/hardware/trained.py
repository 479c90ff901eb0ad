"""A small residual network after three epochs of a step, under every method."""

from __future__ import annotations

from typing import Any

import torch

from fractrain_fx import Engine, FracModel, Pin, RunConfig
from tests.build import made_once, paper, rewritten
from tests.training.tiny import TinyNet

__all__ = ["BATCH", "METHODS", "trained"]

BATCH = 16

METHODS: list[tuple[str, dict[str, Any]]] = [
    ("float", {}),
    ("static", {"precision": "FW-8/BW-16"}),
    ("pfq", {"schedule": "manual", "run": RunConfig(length=3), "stages": "FW(3,4,8)/BW(6,6,8)"}),
    ("dfq", {}),
    ("slu", {"pins": (Pin.parse("head=8/8"),)}),
]


@made_once
def trained(method: str, **fields: Any) -> tuple[FracModel, Engine]:
    """The model and its engine; the gates of ``dfq`` have the paper's options."""
    torch.manual_seed(0)
    x = torch.rand(BATCH, 3, 8, 8)
    model = rewritten(TinyNet(4), x, config=paper(method, **fields))
    engine = Engine(model)
    for _ in range(3):
        engine.loss(model(x + torch.rand_like(x)).square().mean()).backward()
        engine.end_epoch()
    return model, engine
