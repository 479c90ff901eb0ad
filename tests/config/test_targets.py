"""Targets that the gates cannot reach, and the precision of ops that follow the target."""

from __future__ import annotations

import pytest

from fractrain_fx import FracConfig, Precision
from fractrain_fx.config import AUTHORS_OPTIONS
from fractrain_fx.config.targets import CostReach, resolve_targets, scheduled_precision
from fractrain_fx.errors import TargetError

# What options 3/6 to 6/12 with weights of 4 bits can reach (ALGORITHM 1).
LOW, HIGH = 1.758, 4.688


def reach(config: FracConfig, low: float, high: float, scheduled: float = 0.0) -> CostReach:
    """Of 100 MACs; ``scheduled`` of them have weights and follow the stage."""
    gated = 1 - scheduled / 100
    bits = config.gate_weight_bits
    spent = {option: scheduled * sum(option.shares(bits)) / 3 for option in config.precision_stages}
    return CostReach((low * gated, high * gated), 100 - scheduled, 100, spent)


def test_targets_out_of_reach_saturate_on_request_only() -> None:
    config = FracConfig(options=AUTHORS_OPTIONS, weight_bits=4, targets=(1.5, 2.0, 5.0))
    gates = reach(config, LOW, HIGH)
    with pytest.raises(TargetError, match=r"1\.5 % cannot be reached.*saturate=True"):
        resolve_targets(config, gates)
    assert resolve_targets(config.replace(**{"targets.saturate": True}), gates) == (LOW, 2.0, HIGH)


@pytest.mark.parametrize(
    ("target", "precision"),
    [
        (1.5, "2/6"),
        (2.0, "2/6"),
        (2.34375, "3/6"),
        (2.5, "3/6"),
        (3.0, "4/6"),
        (4.3, "6/8"),
        (5.0, "4/12"),
        (9, "6/12"),
    ],
)
def test_a_scheduled_op_has_the_dearest_option_that_costs_no_more_than_the_target(
    target: float, precision: str
) -> None:
    assert scheduled_precision(FracConfig.paper(), target) == Precision.parse(precision)


def test_a_target_between_two_precisions_of_scheduled_ops_is_out_of_reach_if_few_ops_are_gated() -> None:
    """No option costs 2.8 to 4.2 %, so ops at 4/6 (2.73 %) leave 3.5 % to the gates, and one tenth is too little."""
    config = FracConfig.paper(targets=(2.0, 3.5))
    assert resolve_targets(config, reach(config, 0.0, 5.86, scheduled=50)) == (2.0, 3.5)
    few = reach(config, 0.0, 5.86, scheduled=90)
    with pytest.raises(TargetError, match=r"3\.5 % cannot be reached.*90 % that no gate can choose for at FW-4/BW-6"):
        resolve_targets(config, few)
    saturated = resolve_targets(config.replace(**{"targets.saturate": True}), few)
    assert saturated == pytest.approx((2.0, 0.9 * 100 * 84 / 3072 + 0.1 * 5.86))
    assert scheduled_precision(config, saturated[1]) == Precision(4, 6)


def test_default_targets_move_up_for_ops_that_follow_the_stage() -> None:
    config = FracConfig(options=("6/8", "8/8"))
    gates = reach(config, 3.39, 4.17, scheduled=90)
    targets = resolve_targets(config, gates)
    low, high = gates.interval
    assert low == pytest.approx(0.1 * 3.39 + 0.9 * 100 * 104 / 3072)
    assert low < targets[0] and sorted(targets) == list(targets) and targets[-1] < high


def test_default_targets_are_those_that_trained_best() -> None:
    for method, expected in (("fractrain", (2.9, 3.4, 3.6, 3.8)), ("dfq", (3.8,))):
        config = FracConfig(method=method)  # type: ignore[arg-type]
        assert resolve_targets(config, reach(config, 1.76, 4.17)) == expected
