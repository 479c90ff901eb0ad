"""What a configuration says of how blocks run; an option that would change nothing is an error."""

from __future__ import annotations

from typing import Any

import pytest

from fractrain_fx import FracConfig, GateConfig, Pin, Precision
from fractrain_fx.config import DISPATCH_FROM
from fractrain_fx.errors import ConfigError


def test_blocks_run_for_all_samples_unless_asked() -> None:
    assert not FracConfig().dispatches
    auto = FracConfig(execution="auto")
    assert auto.dispatches and auto.dispatch_from == DISPATCH_FROM
    assert auto.replace(skip_threshold=0.5).dispatch_from == 0.5
    assert not auto.replace(skipping="masked").dispatches
    assert FracConfig.from_dict(auto.to_dict()) == auto


def test_ops_may_run_on_int8_where_they_have_codes() -> None:
    assert not FracConfig(method="pfq").may_use_codes
    for method in ("pfq", "static", "dfq", "fractrain"):
        assert FracConfig(method=method, execution="auto").may_use_codes  # type: ignore[arg-type]
    wide = FracConfig(execution="auto", weight_bits=12)
    assert not wide.may_use_codes and wide.dispatches
    assert wide.replace(pins=(Pin("head", Precision(8, 8)),)).may_use_codes
    assert not FracConfig(execution="auto", kernels="float").may_use_codes


@pytest.mark.parametrize("execution", ["torchao-int8", "torchao-float8"])
def test_torchao_computes_at_eight_bits_only(execution: Any) -> None:
    config = FracConfig(method="static", execution=execution)
    assert config.torchao == execution and not config.dispatches and not config.may_use_codes
    assert FracConfig.from_dict(config.to_dict()) == config
    assert config.replace(attention="float", pins=(Pin("head", Precision(4, 4)),)).torchao
    assert FracConfig(method="static", execution="auto").torchao is None
    for changes, message in (
        ({"method": "pfq"}, "which does not fit method 'pfq': write method='static'"),
        ({"method": "fractrain"}, "always computes linear layers at 8 bits"),
        ({"method": "float"}, "which does not fit method 'float'"),
        ({"precision": Precision(8, 16)}, "which does not fit method 'static' at FW-8/BW-16"),
        ({"format": "dorefa"}, "not in format 'dorefa': write format='affine'"),
        ({"kernels": "int8"}, f"kernels='int8' changes nothing with execution='{execution}'"),
        ({"skip_threshold": 0.5}, f"skip_threshold=0.5 changes nothing with execution='{execution}'"),
    ):
        with pytest.raises(ConfigError, match=message):
            config.replace(**changes)


def test_torchao_follows_a_recipe_of_the_formats_that_it_has() -> None:
    assert FracConfig(method="static", format="fp8", execution="torchao-float8").torchao == "torchao-float8"
    assert FracConfig(method="static", format="mx", recipe="mxfp8", execution="torchao-mxfp8").torchao
    for words, message in (
        ({"execution": "torchao-mxfp8"}, "not in format 'affine': write format='mx'.*write execution='torchao-int8'"),
        ({"execution": "torchao-float8", "format": "mx"}, "write execution='torchao-mxfp8'"),
        (
            {"execution": "torchao-mxfp8", "format": "mx", "recipe": "mxfp4"},
            "follows recipe 'mxfp8', not recipe='mxfp4'",
        ),
        (
            {"execution": "torchao-mxfp8", "format": "nvfp4", "precision": "4/4"},
            "always computes linear layers at 8 bits",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            FracConfig(**{"method": "static", **words})


@pytest.mark.parametrize(
    "options, message",
    [
        ({"execution": "fast"}, "execution='fast' is unknown: write one of simulate, auto"),
        ({"execution": "auto", "skipping": "drop"}, "skipping='drop' is unknown"),
        ({"execution": "auto", "method": "pfq", "kernels": "float"}, "changes nothing for method 'pfq'"),
        ({"execution": "auto", "method": "float"}, "Write execution='simulate'"),
        ({"execution": "auto", "method": "pfq", "format": "dorefa"}, "'affine' with ranges='tensor'"),
        (
            {"execution": "auto", "options": (Precision(3, 6), Precision(6, 8)), "weight_bits": 12},
            "option FW-0/BW-0",
        ),
        ({"kernels": "int8"}, "kernels='int8' changes nothing with execution='simulate'"),
        ({"kernels": "int4"}, "kernels='int4' is unknown: write one of auto, float, int8"),
        ({"execution": "auto", "method": "slu", "kernels": "int8"}, "8 forward bits or fewer"),
        ({"skip_threshold": 0.5}, "changes nothing with execution='simulate'"),
        ({"execution": "auto", "skipping": "masked", "skip_threshold": 0.5}, "skipping='masked'"),
        ({"execution": "auto", "skip_threshold": 1.5}, "must lie in 0..1"),
        ({"execution": "auto", "skip_threshold": float("nan")}, "must lie in 0..1"),
        ({"gradient_grid": "none"}, "gradient_grid='none' is unknown"),
        ({"gradient_grid": "zero", "method": "float"}, "changes nothing for method 'float'"),
        ({"gradient_grid": "zero", "format": "dorefa"}, "changes nothing for method 'fractrain' with format 'dorefa'"),
        ({"gradient_grid": "zero", "execution": "auto"}, "goes with execution='simulate'"),
        ({"ranges": "rows"}, "ranges='rows' is unknown.*'row'"),
        (
            {"ranges": "row", "format": "dorefa"},
            "ranges='row' changes nothing for method 'fractrain' with format 'dorefa'",
        ),
        ({"ranges": "head", "rounding": "compiled"}, "does not go with ranges='head'.*write rounding='eager'"),
        ({"ranges": "row", "method": "static", "execution": "torchao-int8"}, "torchao's own ranges"),
        (
            {"ranges": "row", "method": "static", "execution": "auto", "kernels": "int8"},
            "kernels='int8' changes nothing",
        ),
        ({"saturate_targets": True}, "goes with targets that were set"),
        ({"saturate_targets": True, "targets": (1.5,), "method": "pfq"}, "changes nothing for method 'pfq'"),
        ({"gate": GateConfig(gradient="fisher"), "method": "slu"}, "whose options round nothing"),
        ({"gate": GateConfig(gradient="fisher"), "execution": "auto"}, "write skipping='masked'"),
        ({"indicator": "cost"}, "indicator='cost' is unknown: write one of task, total"),
        ({"indicator": "total", "method": "dfq"}, "changes nothing for method 'dfq'"),
        ({"indicator": "total", "schedule": "manual", "epochs": 4}, "with schedule='manual'"),
    ],
)
def test_what_changes_nothing_or_cannot_be_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FracConfig(**options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"control": "signs"}, "gate.control='signs' is unknown: write one of sign, multiplier.* 'sign'"),
        ({"init": "xavier"}, "gate.init='xavier' is unknown: write one of linear, he"),
        ({"gradient": "fischer"}, "gate.gradient='fischer' is unknown.*'fisher'"),
        ({"control": "sign", "gain": 2.0}, "gate.gain=2.0 changes nothing with control='sign'"),
        ({"control": "sign", "integral_gain": 0.1}, "integral_gain=0.1 changes nothing with control='sign'"),
        ({"gain": 0.0}, "gate.gain=0.0 must be above 0"),
        ({"control": "multiplier", "integral_gain": float("inf")}, "must be above 0 and finite"),
    ],
)
def test_a_control_takes_the_gains_that_it_has(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GateConfig(**options)


def test_gains_are_those_of_the_control_unless_given() -> None:
    assert GateConfig(control="sign").gains == (0, 0)
    multiplier = GateConfig(control="multiplier", gain=3.0)
    assert multiplier.gains == (3.0, GateConfig(control="multiplier").gains[1]) and multiplier.gains[1] > 0
    config = FracConfig(gate=multiplier, targets=(1.0, 9.0), saturate_targets=True, indicator="total")
    assert FracConfig.from_dict(config.to_dict()) == config
