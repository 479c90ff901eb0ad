"""DESIGN 5, number 6: two processes see the same strength, stage and ledger as one with the whole batch."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fractrain_fx.config import Fixed, FracConfig, GateConfig, Steps, Tokens
from fractrain_fx.engine import Engine
from fractrain_fx.engine.dependence import ChoiceMeter
from fractrain_fx.errors import NonFiniteLossError
from tests.engine.fake import FakeModel

pytestmark = pytest.mark.long

TURNS = (Tokens(100), Tokens(1000), Tokens(2000))
TURNS_IN_STEPS = (Steps(2), Steps(6), Steps(8))
SIGN = FracConfig(targets=(2.5, 3.0), gate=GateConfig(control="sign"))
MULTIPLIER = FracConfig(targets=(2.5, 3.0), gate=GateConfig(control="multiplier"))


def _rank(rank: int, folder: str, config: FracConfig) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = FakeModel(config)
    engine = Engine(model)
    # Alone, rank 0 (2.0 %) would push up and rank 1 (4.6 %) down; together they are above 2.5 %.
    model(4, k=1 + 4 * rank)
    loss = engine.loss(torch.tensor(float(rank)))
    (loss / 2).backward()  # DDP's mean over two processes
    push = float(model.pushes()[0][0, 1])
    engine.end_epoch()
    clocked = FakeModel(FracConfig(method="pfq", schedule=Fixed(turns=TURNS, every=Tokens(100))))
    counting = Engine(clocked)
    for number in range(4):  # 40 tokens a step together; the processes have different numbers of them
        clocked.tokens = 15 + 10 * rank
        clocked(4)
        counting.loss(torch.tensor(float(rank + number)))
        counting.end_step()
    clock = counting.state_dict()
    meter = ChoiceMeter()
    if rank == 0:  # the other one may have a batch less
        meter.add(model.cost.choice)
    dependence = meter.read()
    assert dependence is not None
    facts = {"push": push, "ledger": engine.ledger.to_dict(), "stage": engine.stage, **asdict(dependence)}
    facts["clock"] = clock
    facts |= engine.state_dict()["cost_term"]
    Path(folder, f"{rank}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


@pytest.mark.parametrize("config", [SIGN, MULTIPLIER], ids=["sign", "multiplier"])
def test_two_processes_agree(tmp_path: Path, config: FracConfig) -> None:
    mp.spawn(_rank, (str(tmp_path), config), nprocs=2)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first["clock"]["stage"] == 1 and first["clock"]["clock"]["tokens"] == 160
    assert [part["step"] for part in first["clock"]["parts"]["rows"]] == [3]
    assert first["ledger"]["epochs"][0]["loss"] == 0.5
    assert first["ledger"]["samples"] == 8

    model = FakeModel(config)
    engine = Engine(model)
    cost = first["ledger"]["epochs"][0]["cp"]
    both = torch.tensor([1, 1, 1, 1, 5, 5, 5, 5])
    model(8, k=both)
    assert float(model.cost.cp.detach()) == pytest.approx(cost)
    engine.loss(torch.zeros(())).backward()
    state = engine.state_dict()["cost_term"]
    assert state == pytest.approx({name: first[name] for name in state}, rel=1e-5)
    assert bool(state) == (config is MULTIPLIER)
    assert first["configurations"] == 1
    assert abs(first["push"] - float(model.pushes()[0][0, 1])) < 1e-9


def _with_one_bad_loss(rank: int, folder: str) -> None:
    """The stage after each step of two epochs, or that the step was refused. The second process has a bad loss."""
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    model = FakeModel(FracConfig(method="pfq", schedule=Fixed(turns=TURNS_IN_STEPS, every=Steps(2))))
    engine, seen = Engine(model), []
    for number in range(10):
        model(4)
        engine.loss(torch.tensor(float("nan") if number == rank == 1 else 1.0))
        try:
            engine.end_step()
            seen.append(str(engine.stage))
        except NonFiniteLossError:
            seen.append("refused")
        if number == 5:
            engine.end_epoch()
    engine.end_epoch()
    Path(folder, f"{rank}.json").write_text(json.dumps([seen, engine.ledger.to_dict()]))
    dist.destroy_process_group()


def test_a_bad_loss_of_one_process_is_one_of_all(tmp_path: Path) -> None:
    mp.spawn(_with_one_bad_loss, (str(tmp_path),), nprocs=2)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first[0] == ["0", "refused", "0", "1", "1", "1", "1", "2", "2", "3"]
