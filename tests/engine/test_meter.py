"""Sums of an epoch and of a window: the device on which processes add them up, and their precision."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fractrain_fx.config import ByLength, FracConfig, Tokens
from fractrain_fx.engine import Engine
from fractrain_fx.engine.meter import EpochMeter
from fractrain_fx.export.choices import commonest
from fractrain_fx.nn.cost import Cost
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


COUNTS = (3001, 257, 1743)


def half_choices() -> Cost:
    """The cost of a batch whose samples choose among three options, in a half type."""
    chosen = torch.repeat_interleave(torch.arange(3), torch.tensor(COUNTS))
    one = torch.ones(())
    return Cost(
        one, one, one, one, one, {"block": torch.nn.functional.one_hot(chosen).bfloat16()}, macs=one, steered_macs=one
    )


def test_shares_of_options_are_whole_numbers_of_samples_in_half_types_too() -> None:
    meter = EpochMeter()
    for _ in range(2):
        meter.add(torch.ones(()), half_choices(), sum(COUNTS))
    found = meter.read()
    assert found.samples == 2 * sum(COUNTS) and sum(found.options["block"]) == pytest.approx(1, abs=1e-12)
    assert [share * found.samples for share in found.options["block"]] == pytest.approx([2 * each for each in COUNTS])


def test_the_commonest_option_is_counted_in_half_types_too() -> None:
    model = nn.Identity()
    model.cost = half_choices()  # type: ignore[assignment]
    options, shares = commonest(model, [torch.zeros(1)])
    assert options == {"block": 0} and shares == {"block": pytest.approx(3001 / 5001)}
