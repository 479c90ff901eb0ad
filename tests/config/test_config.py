"""Groups of a configuration, in code and in files; an option that would change nothing is an error."""

from __future__ import annotations

import errno
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from fractrain_fx import (
    AffineConfig,
    ByLength,
    CostTargets,
    Cyclic,
    Fixed,
    FracConfig,
    GateConfig,
    LossPlateau,
    Pin,
    Precision,
    RunConfig,
    Steps,
    TwoStage,
)
from fractrain_fx.config import DFQ_OPTIONS
from fractrain_fx.config.run import LEFT_OUT_FROM
from fractrain_fx.errors import ConfigError, RunError


def test_blocks_run_for_all_samples_unless_asked() -> None:
    assert not FracConfig.paper().dispatches
    left_out = FracConfig.paper(run=RunConfig(skipping="left-out"))
    assert left_out.dispatches and left_out.run.left_out_from == LEFT_OUT_FROM
    assert left_out.replace(**{"run.skipping": 0.5}).run.left_out_from == 0.5
    assert not left_out.replace(**{"run.skipping": "computed"}).dispatches
    assert FracConfig.from_dict(left_out.to_dict()) == left_out


def test_ops_may_run_on_int8_where_they_have_codes() -> None:
    assert not FracConfig(method="pfq").may_use_codes
    codes = RunConfig(backend="codes")
    for method in ("pfq", "static", "dfq", "fractrain"):
        assert FracConfig(method=method, run=codes).may_use_codes
    assert FracConfig(run=codes, weight_bits=12, pins=(Pin("head", Precision(8, 8)),)).may_use_codes
    assert not FracConfig.paper(run=RunConfig(skipping="left-out")).may_use_codes


def test_torchao_computes_ops_of_one_precision_in_formats_that_it_has() -> None:
    config = FracConfig(method="static", format="mx", recipe="mxfp8", run=RunConfig(torchao=True))
    assert FracConfig.from_dict(config.to_dict()) == config
    assert FracConfig(method="static", pins=(Pin("head", recipe="mxfp8"),), run=RunConfig(torchao=True)).run.torchao
    for changes, message in (
        ({"method": "float"}, "one precision at a time, and method 'float'"),
        ({"format": "affine", "recipe": None}, "computes in formats mx, fp8, int, not in 'affine'"),
    ):
        with pytest.raises(ConfigError, match=message):
            config.replace(**changes)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (RunConfig, {"backend": "fast"}, "run.backend='fast' is unknown: write one of auto, plain, cpu"),
        (RunConfig, {"skipping": "drop"}, "run.skipping='drop' is unknown: write one of computed, left-out"),
        (RunConfig, {"skipping": 1.5}, "must lie in 0..1"),
        (RunConfig, {"skipping": float("nan")}, "must lie in 0..1"),
        (RunConfig, {"skipping": True}, "run.skipping=True is unknown"),
        (RunConfig, {"length": 0}, "run.length=0 must be at least 1 epoch"),
        (RunConfig, {"length": "many"}, "run.length='many' is not a number of steps or tokens"),
        (RunConfig, {"recordings": 0}, "run.recordings=0 must be at least 1"),
        (RunConfig, {"batch_axis": -1}, "run.batch_axis=-1 must be at least 0"),
        (AffineConfig, {"gradient_grid": "none"}, "affine.gradient_grid='none' is unknown"),
        (AffineConfig, {"ranges": "rows"}, "affine.ranges='rows' is unknown.*'row'"),
        (AffineConfig, {"keep": 1.5}, "affine.keep=1.5 must lie in 0..1"),
        (ByLength, {"indicator": "cost"}, "schedule.indicator='cost' is unknown: write one of task, total"),
        (LossPlateau, {"epsilon": -1.0}, "schedule.epsilon=-1.0 must lie in 0..$"),
        (LossPlateau, {"alpha": 2.0}, "schedule.alpha=2.0 must lie in 0..1"),
        (Cyclic, {"cycles": 0}, "schedule.cycles=0 must be at least 1"),
        (CostTargets, {"saturate": 1}, "targets.saturate=1 must be True or False"),
    ],
)
def test_a_group_refuses_a_value_that_it_cannot_have(kind: type, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**fields)


LEFT_OUT, CODES, ALWAYS = (
    {"run": RunConfig(skipping="left-out")},
    {"run": RunConfig(backend="codes")},
    {"run": RunConfig(backend="codes-always")},
)
ROW, ZERO = {"affine": AffineConfig(ranges="row")}, {"affine": AffineConfig(gradient_grid="zero")}
FISHER = {"gate": GateConfig(gradient="fisher")}


def test_a_file_that_cannot_be_replaced_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = tmp_path / "config.yaml"
    FracConfig().to_yaml(file)
    before = file.read_bytes()
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RunError, match="No space left"):
        FracConfig(method="pfq").to_yaml(file)
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "options, message",
    [
        ({**LEFT_OUT, "method": "pfq"}, "run.skipping='left-out' changes nothing for method 'pfq'"),
        ({**LEFT_OUT, "options": (Precision(3, 6), Precision(6, 8))}, "option FW-0/BW-0"),
        ({**CODES, "method": "float"}, "Write run.backend='auto'"),
        ({**CODES, "method": "pfq", "format": "dorefa"}, "'affine' with affine.ranges='tensor'"),
        ({**CODES, "weight_bits": 12}, "run.backend='codes' changes nothing"),
        ({**ALWAYS, "method": "slu"}, "8 forward bits or fewer"),
        ({**ALWAYS, **ROW, "method": "static"}, "run.backend='codes-always' changes nothing"),
        ({**CODES, **ZERO}, "and affine.gradient_grid='range'"),
        ({**ROW, "run": RunConfig(backend="cpu")}, "run.backend='cpu' changes nothing.*affine.ranges='tensor'"),
        (
            {"format": "mx", "method": "static", "run": RunConfig(backend="codes")},
            "run.backend='codes' changes nothing",
        ),
        ({**ROW, "format": "dorefa"}, "affine.ranges='row' changes nothing for format 'dorefa': it is for 'affine'"),
        ({"targets": CostTargets(saturate=True), "method": "pfq"}, "changes nothing for method 'pfq'"),
        ({**FISHER, "method": "slu"}, "whose options round nothing"),
        ({**FISHER, **LEFT_OUT, "options": ("0/0", "6/8")}, "or run.skipping='computed'"),
        ({"run": RunConfig(length=Steps(100))}, "run.length='100 steps' does not fit schedule.every=None"),
    ],
)
def test_what_changes_nothing_or_cannot_be_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FracConfig(**options)


def test_a_schedule_is_a_word_or_one_with_its_own_settings() -> None:
    assert FracConfig(schedule=None).schedule == FracConfig().schedule == ByLength()
    assert FracConfig(schedule="cyclic").schedule == Cyclic(8)
    assert FracConfig.from_dict({"schedule": {"kind": "auto", "epsilon": 0.1}}).schedule == LossPlateau(0.1)
    config = FracConfig(schedule=Fixed([0.5, Steps(90)], every="10 steps"))  # type: ignore[arg-type]
    assert config.to_dict()["schedule"] == {"kind": "fixed", "every": "10 steps", "turns": [0.5, "90 steps"]}
    assert FracConfig.from_dict(config.to_dict()) == config
    for schedule, message in (
        ("manuel", "schedule='manuel' is unknown.* 'manual'"),
        ("fixed", "write Fixed"),
        ({"kind": "manual", "epsilon": 0.1}, "Manual has no field 'epsilon'"),
    ):
        with pytest.raises(ConfigError, match=message):
            FracConfig.from_dict({"schedule": schedule})


def test_replace_takes_dotted_names_and_leaves_the_rest_of_the_group() -> None:
    config = FracConfig(gate=GateConfig(hidden=8), run=RunConfig(length=5, batch_axis=1))
    changed = config.replace(**{"gate.beta": 0.01, "run.length": 9, "schedule.epsilon": 0.1, "weight_bits": 4})
    assert changed.gate == GateConfig(hidden=8, beta=0.01) and changed.run == RunConfig(length=9, batch_axis=1)
    assert changed.schedule == ByLength(0.1) and changed.weight_bits == 4
    for name, message in (
        ("gate.bta", "GateConfig has no field 'bta'.* 'beta'"),
        ("gat.beta", "FracConfig has no field 'gat'.* 'gate'"),
        ("schedule.turns", "ByLength has no field 'turns'"),
        ("method.word", "has no fields"),
    ):
        with pytest.raises(ConfigError, match=message):
            config.replace(**{name: 1})


def test_there_are_at_most_fourteen_fields_and_all_go_through_a_file(tmp_path: Path) -> None:
    assert len(fields(FracConfig)) <= 14
    config = FracConfig(
        run=RunConfig(length="1000 steps", skipping=0.25),  # type: ignore[arg-type]
        options=DFQ_OPTIONS,
        schedule=TwoStage(0.1, indicator="total", every=Steps(100)),
        affine=AffineConfig(keep=0.5),
        targets=CostTargets((1.0, 9.0), saturate=True),
    )
    config.to_yaml(tmp_path / "config.yaml")
    assert FracConfig.from_yaml(tmp_path / "config.yaml") == config
    assert config.windows == 10 and config.replace(**{"run.length": 7}).windows is None


@pytest.mark.parametrize(
    "options, message",
    [
        ({"control": "signs"}, "gate.control='signs' is unknown: write one of sign, multiplier.* 'sign'"),
        ({"init": "xavier"}, "gate.init='xavier' is unknown: write one of linear, he"),
        ({"gradient": "fischer"}, "gate.gradient='fischer' is unknown.*'fisher'"),
        ({"control": "sign", "gain": 2.0}, "gate.gain=2.0 changes nothing with control='sign'"),
        ({"control": "sign", "integral_gain": 0.1}, "integral_gain=0.1 changes nothing with control='sign'"),
        ({"control": "multiplier", "gain": 0.0}, "gate.gain=0.0 must be above 0"),
        ({"control": "multiplier", "integral_gain": float("inf")}, "must be above 0 and finite"),
    ],
)
def test_a_control_takes_the_gains_that_it_has(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GateConfig(**options)


def test_gains_that_are_given_come_back_from_a_dict() -> None:
    multiplier = GateConfig(control="multiplier", gain=3.0)
    config = FracConfig(
        gate=multiplier, schedule=ByLength(indicator="total"), targets=CostTargets((1.0, 9.0), saturate=True)
    )
    assert FracConfig.from_dict(config.to_dict()) == config
