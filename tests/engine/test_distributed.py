"""DESIGN 5, number 6: two processes see the same sign, stage and ledger as one with the whole batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fractrain_fx.config import FracConfig
from fractrain_fx.engine import Engine
from tests.engine.fake import FakeModel

pytestmark = pytest.mark.long

CONFIG = FracConfig(targets=(2.5, 3.0))


def _rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = FakeModel(CONFIG)
    engine = Engine(model)
    # Alone, rank 0 (2.0 %) would push up and rank 1 (4.6 %) down; together they are above 2.5 %.
    model(4, k=1 + 4 * rank)
    loss = engine.loss(torch.tensor(float(rank)))
    (loss / 2).backward()  # DDP's mean over two processes
    push = float(model.cost.choice["block0"].grad[0, 1])
    engine.end_epoch()
    facts = {"push": push, "ledger": engine.ledger.to_dict(), "stage": engine.stage}
    Path(folder, f"{rank}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


def test_two_processes_agree(tmp_path: Path) -> None:
    mp.spawn(_rank, (str(tmp_path),), nprocs=2)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first["ledger"]["epochs"][0]["loss"] == 0.5
    assert first["ledger"]["samples"] == 8

    model = FakeModel(CONFIG)
    engine = Engine(model)
    model(8, k=5)
    engine.loss(torch.zeros(())).backward()
    assert abs(first["push"] - float(model.cost.choice["block0"].grad[0, 1])) < 1e-9
