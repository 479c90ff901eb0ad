"""What a short training loses at few bits, beside what sensitivities predict."""

from __future__ import annotations

import pytest

from benchmarks.numerics.price import prices
from fractrain_fx.training import build_trainer
from tests.training.runs import quiet, settings


@pytest.mark.long
def test_few_bits_lose_more_and_a_row_has_what_was_predicted() -> None:
    trainer = build_trainer(settings("float", epochs=2), console=quiet())
    trainer.fit()
    asked = ["FW-8/BW-8", "FW-2/BW-8", "FW-8/BW-3:sample"]
    same, forward, backward = prices(trainer, asked, steps=8, rate=0.05)
    assert same["rise"] == 0 and same["forward"] < forward["forward"] and same["noise"] < backward["noise"]
    assert forward["rise"] > 0 and backward["ranges"] == "sample" and backward["forward"] < forward["forward"]
    assert forward["price"] is None
    assert backward["price"] == (backward["rise"] - backward["forward"]) / backward["noise"]
