"""A machine that a user writes, with nothing but what the protocol asks for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fractrain_fx import FracConfig, plan
from fractrain_fx.config.precision import Precision
from fractrain_fx.hardware import OpStep, StepCost, Traffic
from fractrain_fx.hardware.machine import Choices, Price, Work
from tests.training.tiny import TinyNet


class Mine:
    """Prices contractions alone, a nanosecond a MAC."""

    name = "mine"

    def supports(self, precision: Precision, format: str) -> bool:
        return format == "affine" and precision.fw <= 8

    def step(self, ops: Sequence[Work], choices: Choices, *, batch: int = 1) -> StepCost:
        known = {
            op.name: OpStep({"FW": Price(batch * op.macs * 1e-9, None, "compute")})
            for op in ops
            if not isinstance(op, Traffic) and op.macs is not None
        }
        return StepCost(sum(price.seconds for price in known.values()), None, known)


def test_a_plan_takes_a_machine_whose_supports_has_no_default() -> None:
    config, x = FracConfig(method="static"), torch.rand(2, 3, 8, 8)
    summary = plan(TinyNet(4), config=config, example_inputs=(x,), machine=Mine(), batch=16)
    float32, eight = summary.steps
    assert not float32.native and eight.native
    assert float32.seconds is not None and float32.seconds == eight.seconds and float32.seconds > 0
    assert "relu" in eight.unpriced and "FW-8/BW-8" in str(summary)
