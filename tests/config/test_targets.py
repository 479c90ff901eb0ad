"""Targets that the gates cannot reach: an error, or the nearest that they can."""

from __future__ import annotations

import pytest

from fractrain_fx import FracConfig
from fractrain_fx.config import AUTHORS_OPTIONS
from fractrain_fx.config.targets import resolve_targets
from fractrain_fx.errors import TargetError

# What options 3/6 to 6/12 with weights of 4 bits can reach (ALGORITHM 1).
LOW, HIGH = 1.758, 4.688


def test_targets_out_of_reach_saturate_on_request_only() -> None:
    config = FracConfig(options=AUTHORS_OPTIONS, weight_bits=4, targets=(1.5, 2.0, 5.0))
    with pytest.raises(TargetError, match=r"1\.5 % cannot be reached.*saturate_targets"):
        resolve_targets(config, LOW, HIGH)
    assert resolve_targets(config.replace(saturate_targets=True), LOW, HIGH) == (LOW, 2.0, HIGH)
