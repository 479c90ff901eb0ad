"""Sums of an epoch and of a window: the device on which processes add them up, and their precision."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fractrain_fx.config import ByLength, FracConfig, Tokens
from fractrain_fx.engine import Engine
from tests.elsewhere import ELSEWHERE, Elsewhere
from tests.engine.fake import FakeModel


@pytest.fixture
def exchanged(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.device]]:
    """The devices of the sums that a group exchanges; like NCCL, it takes no tensors of the CPU."""
    devices = []

    def all_reduce(values: Tensor) -> None:
        devices.append(values.device)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    dist.init_process_group(f"{ELSEWHERE.type}:gloo", store=dist.HashStore(), rank=0, world_size=1)
    with Elsewhere():
        yield devices
    dist.destroy_process_group()


@pytest.mark.parametrize("method", ["fractrain", "pfq"])
def test_a_run_that_resumes_within_an_epoch_needs_no_batch_before_its_end(
    method: str, exchanged: list[torch.device]
) -> None:
    config = FracConfig(method=method, schedule=ByLength(every=Tokens(100)))  # type: ignore[arg-type]
    model = FakeModel(config)
    model.tokens = 30

    def engine() -> Engine:
        return Engine(model, length=Tokens(300))

    whole, again = engine(), engine()
    for _ in range(2):
        model(4)
        whole.loss(torch.tensor(1.5))
        whole.end_step()
    again.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert again.state_dict() == whole.state_dict()
    again.end_epoch()
    whole.end_epoch()
    assert again.ledger.to_dict() == whole.ledger.to_dict() and again.ledger.rows[0].loss == 1.5
    assert exchanged and set(exchanged) == {ELSEWHERE}


def test_a_given_mean_loss_is_exchanged_too(exchanged: list[torch.device]) -> None:
    model = FakeModel(FracConfig(method="static"))
    engine = Engine(model)
    model(4)
    engine.loss(torch.tensor(1.0))
    engine.end_epoch(2.0)
    assert set(exchanged) == {ELSEWHERE}
