"""Settings by name: the paper's, and the tuned ones, which are those of the best runs in docs/results.md."""

from __future__ import annotations

import pytest

from benchmarks.science.grid import Run
from fractrain_fx import tuned_config
from fractrain_fx.config import (
    DFQ_OPTIONS,
    AffineConfig,
    FracConfig,
    GateConfig,
    LossPlateau,
    Precision,
    RunConfig,
    named_values,
    paper_values,
)
from fractrain_fx.errors import ConfigError
from fractrain_fx.training import RunSettings


@pytest.mark.parametrize(
    ("method", "setting"),
    [
        ("fractrain", "sign+no-skip+cp-2.9-to-3.8"),
        ("dfq", "sign+no-skip+cp-3.8"),
        ("pfq", "stages-from-5"),
    ],
)
def test_they_are_the_settings_of_the_measured_runs(method: str, setting: str) -> None:
    run = RunSettings.from_dict(Run("resnet20-16px", method, setting).values)
    assert tuned_config(method, run=RunConfig(backend="cpu", length=20), schedule="manual") == run.frac


def test_changes_override_them() -> None:
    config = tuned_config(
        run=RunConfig(length=8), weight_bits=6, targets=(3.0, 3.5), gate=GateConfig(gradient="fisher")
    )
    assert config.method == "fractrain" and config.targets is not None and config.targets.per_cent == (3.0, 3.5)
    assert config.weight_bits == 6 and config.gate.control == "multiplier" and config.gate.gradient == "fisher"
    assert config.options[0] == Precision(3, 6) and config.options != FracConfig().options


@pytest.mark.parametrize(("method", "message"), [("static", "pfq, dfq, fractrain have"), ("pfw", "'pfq'")])
def test_other_methods_have_none(method: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tuned_config(method)


@pytest.mark.parametrize("method", ["float", "static", "pfq", "dfq", "fractrain", "slu"])
def test_the_papers_settings_are_written_out_so_that_other_defaults_would_not_change_them(method: str) -> None:
    config, values = FracConfig.paper(method), paper_values(method)
    assert config == FracConfig.from_dict({"method": method, **values})
    if method == "fractrain":
        assert config.gate.control == "sign" and config.options == DFQ_OPTIONS and config.weight_bits == 6
        assert config.schedule == LossPlateau(0.05, 0.3)
    if method == "pfq":
        assert str(config.stages) == "FW(3,4,6,8)/BW(6,6,8,8)" and config.schedule == LossPlateau()
    assert FracConfig.paper(method, affine=AffineConfig(keep=0.8)).affine.keep == 0.8


def test_an_unknown_name_of_a_method_or_of_settings_offers_near_ones() -> None:
    with pytest.raises(ConfigError, match="'fractrain'"):
        FracConfig.paper("fractran")
    with pytest.raises(ConfigError, match="'paper'"):
        named_values("papr", "pfq")
