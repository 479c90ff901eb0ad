"""Every number format under every method: it trains, its cost is the method's, and its gates learn."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fractrain_fx import Cyclic, Engine, FracConfig, RunConfig, fractrainify
from tests.models import thinned
from tests.training.tiny import TinyNet

METHODS: dict[str, dict[str, object]] = {
    "float": {},
    "static": {"precision": "FW-8/BW-8"},
    "pfq": {"schedule": "manual", "run": RunConfig(length=2), "stages": "FW(4,8)/BW(6,8)"},
    "pfq-cyclic": {"method": "pfq", "schedule": Cyclic(2), "run": RunConfig(length=4), "stages": "FW(4,8)/BW(6,8)"},
    "dfq": {"targets": (3.0,)},
    "fractrain": {"schedule": "manual", "run": RunConfig(length=2), "targets": (2.5, 3.0)},
    "fractrain-cyclic": {
        "method": "fractrain",
        "schedule": Cyclic(2),
        "run": RunConfig(length=4),
        "targets": (2.5, 3.0),
    },
    "slu": {"targets": (50.0,)},
}
LEVELS = {
    "float": ["float"] * 4,
    "static": ["FW-8/BW-8"] * 4,
    "pfq": ["FW-4/BW-6"] + ["FW-8/BW-8"] * 3,
    "pfq-cyclic": ["FW-4/BW-6", "FW-8/BW-8"] * 2,
    "dfq": ["cp 3 %"] * 4,
    "fractrain": ["cp 2.5 %"] + ["cp 3 %"] * 3,
    "fractrain-cyclic": ["cp 2.5 %", "cp 3 %"] * 2,
    "slu": ["cp 50 %"] * 4,
}
COSTS = {"FW-8/BW-8": 0.0625, "FW-4/BW-6": 64 / 3072, "float": 1.0}


@pytest.mark.parametrize("fmt", thinned(["affine", "dorefa", "wageubn"], 3))
@pytest.mark.parametrize("name", METHODS)
def test_trains_in_every_format(name: str, fmt: str) -> None:
    config = FracConfig.from_dict({"method": name, "format": fmt} | METHODS[name])
    x, y = torch.rand(32, 3, 8, 8), torch.arange(32) % 4
    x[torch.arange(32), y % 3] += y.view(-1, 1, 1) / 4
    model = fractrainify(TinyNet(4), config=config, example_inputs=(x,), check=False)
    engine = Engine(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for _ in range(4):
        for _ in range(2):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            engine.loss(loss).backward()
            assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
            optimizer.step()
            losses.append(loss.item())
        engine.end_epoch()
    assert min(losses[-2:]) < losses[0]
    assert [row.level for row in engine.ledger.rows] == LEVELS[name]
    for row in engine.ledger.rows:
        if row.level in COSTS:
            # 1e-6: the shares are float32
            assert row.cp == pytest.approx(COSTS[row.level], rel=1e-6)
    if config.gated:
        gates = [p for key, p in model.named_parameters() if key.startswith("frac.")]
        assert gates and any(p.grad is not None and p.grad.abs().sum() > 0 for p in gates)
    model.eval()
    assert model(x).isfinite().all()
