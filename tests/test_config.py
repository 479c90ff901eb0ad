"""What a configuration says of how blocks run; an option that would change nothing is an error."""

from __future__ import annotations

from typing import Any

import pytest

from fractrain_fx import FracConfig, Pin, Precision
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
    assert not FracConfig(method="pfq").lowers
    for method in ("pfq", "static", "dfq", "fractrain"):
        assert FracConfig(method=method, execution="auto").lowers  # type: ignore[arg-type]
    wide = FracConfig(execution="auto", weight_bits=12)
    assert not wide.lowers and wide.dispatches
    assert wide.replace(pins=(Pin("head", Precision(8, 8)),)).lowers
    assert not FracConfig(execution="auto", kernels="float").lowers


@pytest.mark.parametrize("execution", ["torchao-int8", "torchao-float8"])
def test_torchao_computes_at_eight_bits_only(execution: Any) -> None:
    config = FracConfig(method="static", execution=execution)
    assert config.torchao == execution and not config.dispatches and not config.lowers
    assert FracConfig.from_dict(config.to_dict()) == config
    assert config.replace(saved="codes", attention="float", pins=(Pin("head", Precision(4, 4)),)).torchao
    assert FracConfig(method="static", execution="auto").torchao is None
    for changes, message in (
        ({"method": "pfq"}, "which method 'pfq' does not ask for: write method='static'"),
        ({"method": "fractrain"}, "whatever a stage or a gate says"),
        ({"method": "float"}, "which method 'float' does not ask for"),
        ({"precision": Precision(8, 16)}, "which method 'static' at FW-8/BW-16 does not ask for"),
        ({"format": "dorefa"}, "not in those of format 'dorefa': write format='affine'"),
        ({"mixing": "outputs"}, "goes with mixing='inputs'"),
        ({"kernels": "int8"}, f"kernels='int8' changes nothing with execution='{execution}'"),
        ({"skip_threshold": 0.5}, f"skip_threshold=0.5 changes nothing with execution='{execution}'"),
    ):
        with pytest.raises(ConfigError, match=message):
            config.replace(**changes)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"execution": "fast"}, "execution='fast' is unknown: write one of simulate, auto"),
        ({"execution": "auto", "skipping": "drop"}, "skipping='drop' is unknown"),
        ({"execution": "auto", "method": "pfq", "kernels": "float"}, "changes nothing for method 'pfq'"),
        ({"execution": "auto", "method": "float"}, "Write execution='simulate'"),
        ({"execution": "auto", "method": "pfq", "format": "dorefa"}, "what format 'affine' rounds to 8 bits"),
        (
            {"execution": "auto", "options": (Precision(3, 6), Precision(6, 8)), "weight_bits": 12},
            "option FW-0/BW-0",
        ),
        ({"execution": "auto", "mixing": "outputs"}, "goes with mixing='inputs'"),
        ({"kernels": "int8"}, "kernels='int8' changes nothing with execution='simulate'"),
        ({"kernels": "int4"}, "kernels='int4' is unknown: write one of auto, float, int8"),
        ({"execution": "auto", "method": "slu", "kernels": "int8"}, "8 forward bits or fewer"),
        ({"skip_threshold": 0.5}, "changes nothing with execution='simulate'"),
        ({"execution": "auto", "skipping": "masked", "skip_threshold": 0.5}, "skipping='masked'"),
        ({"execution": "auto", "skip_threshold": 1.5}, "must lie in 0..1"),
        ({"execution": "auto", "skip_threshold": float("nan")}, "must lie in 0..1"),
    ],
)
def test_what_changes_nothing_or_cannot_be_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FracConfig(**options)
