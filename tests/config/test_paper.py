"""The paper's settings by name, whatever the defaults are."""

from __future__ import annotations

import pytest

from fractrain_fx.config import (
    DFQ_OPTIONS,
    AffineConfig,
    ByLength,
    CostTargets,
    FracConfig,
    GateConfig,
    LossPlateau,
    RunConfig,
    paper_values,
)
from fractrain_fx.errors import ConfigError

GATED = {"options": DFQ_OPTIONS, "weight_bits": 6, "gate": GateConfig(control="sign", dims=(32, 16), hidden=16)}
TARGETS = CostTargets((1.5, 2.0, 2.5, 3.0), saturate=True)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("float", {}),
        ("static", {"precision": "FW-8/BW-8"}),
        ("pfq", {"stages": "FW(3,4,6,8)/BW(6,6,8,8)", "schedule": LossPlateau(0.05, 0.3)}),
        ("dfq", {**GATED, "targets": CostTargets((3.0,), saturate=True)}),
        ("fractrain", {**GATED, "targets": TARGETS, "schedule": LossPlateau(0.05, 0.3)}),
        ("slu", {"gate": GATED["gate"]}),
    ],
)
def test_they_are_those_of_supplement_4_to_7(method: str, expected: dict[str, object]) -> None:
    config = FracConfig.paper(method)
    assert config == FracConfig(method=method, **expected)  # type: ignore[arg-type]
    assert config == FracConfig.from_dict({"method": method, **paper_values(method)})


def test_they_are_not_the_defaults() -> None:
    for method in ("pfq", "dfq", "fractrain"):
        assert FracConfig.paper(method, schedule="by-length") != FracConfig(method=method)


def test_changes_override_them() -> None:
    config = FracConfig.paper(schedule="by-length", run=RunConfig(length=8), affine=AffineConfig(keep=0.8))
    assert config.method == "fractrain" and config.schedule == ByLength() and config.options == DFQ_OPTIONS
    assert config.run.length == 8 and config.affine.keep == 0.8
    assert config.replace(targets=(2.0, 3.0)).targets == CostTargets((2.0, 3.0))


def test_an_unknown_method_offers_near_ones() -> None:
    with pytest.raises(ConfigError, match="'fractrain'"):
        FracConfig.paper("fractran")
