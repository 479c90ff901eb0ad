"""Arguments of the wrong kind: every entry point names the argument, what it got, and what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fractrain_fx import (
    ByLength,
    CostTargets,
    Engine,
    FracConfig,
    GateConfig,
    Pin,
    PrecisionStages,
    RunConfig,
    fractrainify,
    plan,
    summarize,
)
from fractrain_fx.drawing import draw
from fractrain_fx.errors import ConfigError, FracTrainError, InputError, ModelError, RunError
from fractrain_fx.training import RunSettings, TrainSettings
from fractrain_fx.training.models import build_model
from tests.residual import Residual

X = torch.randn(2, 6)


@pytest.mark.parametrize("function", [fractrainify, plan])
@pytest.mark.parametrize(
    ("model", "arguments", "error", "message"),
    [
        (Residual, {}, InputError, r"Residual is a class: .* Residual\(\)"),
        (None, {}, InputError, "not NoneType"),
        (Residual(), {"example_inputs": X}, InputError, r"is a Tensor.* example_inputs=\(x,\)"),
        (Residual(), {"example_inputs": "x"}, InputError, "is a str"),
        (Residual(), {"example_kwargs": [X]}, InputError, "is a list.* dictionary"),
        (Residual(), {"config": "pfq"}, ConfigError, r"config=FracConfig\(method='pfq'\)"),
        (Residual(), {"config": {"method": "pfq"}}, ConfigError, "is a dict"),
    ],
)
def test_functions(
    function: Any, model: Any, arguments: dict[str, Any], error: type[FracTrainError], message: str
) -> None:
    with pytest.raises(error, match=message):
        function(model, **arguments)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pins": ("a.*=FW-8/BW-8",)}, r"'a\.\*=FW-8/BW-8', which is no Pin: write Pin\("),
        ({"pins": Pin("a", "8/8")}, "must be a list"),
        ({"targets": 3.0}, r"targets=3\.0 must be a list"),
        ({"targets": "3"}, "targets='3' must be a list"),
        ({"targets": ["3"]}, r"must be numbers"),
        ({"options": "FW-3/BW-6"}, "must be a list"),
        ({"run": {"length": 3}}, r"must be a RunConfig, like RunConfig\(length=3\)"),
        ({"weight_bits": 4.0}, "weight_bits=4.0 must be a whole number"),
        ({"weight_bits": True}, "weight_bits=True must be a whole number"),
        ({"gate": {"control": "sign"}}, r"must be a GateConfig, like GateConfig\(control='sign'\)"),
        ({"method": "pfq", "targets": [3.0]}, "targets=.* changes nothing for method 'pfq'"),
        ({"method": "static", "stages": "FW(3,4)/BW(6,6)"}, r"stages=FW\(3,4\)/BW\(6,6\) changes nothing"),
        ({"method": "pfq", "precision": "FW-4/BW-8"}, "precision=FW-4/BW-8 changes nothing .* for 'static'"),
        ({"method": "slu", "options": ("FW-3/BW-6",)}, "options=FW-3/BW-6 changes nothing for method 'slu'"),
        ({"method": "slu", "weight_bits": 6}, "weight_bits=6 changes nothing for method 'slu': it is for 'dfq', 'frac"),
        ({"method": "pfq", "gate": GateConfig(hidden=8)}, r"gate.hidden=8 changes nothing for method 'pfq'"),
        ({"schedule": {"kind": "manual", "epsilon": 0.1}}, "Manual has no field 'epsilon'"),
    ],
)
def test_fields_of_a_configuration(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FracConfig(**fields)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"options": None}, r"options=None must be a list: write options=\['FW-3/BW-6'"),
        ({"options": "3/6"}, "options='3/6' must be a list"),
        ({"schedule": {"kind": "fixed", "turns": 0.5}}, "turns=0.5 must be a list"),
        ({"pins": 3}, "pins=3 must be a list"),
        ({"pins": [3]}, r"write pins=\['layer4"),
        ({"pins": [{"precision": "8/8"}]}, "not a rule with a pattern"),
        ({"pins": [{"pattern": "a", "precison": "8/8"}]}, "Pin has no field 'precison'.* 'precision'"),
        ({"gate": {"dims": ["a", "b"]}}, "must be whole numbers"),
        ({"gate": {"dims": [1.7, 2.2]}}, "must be whole numbers"),
        ({"gate": {3: 4}}, "GateConfig has no field 3"),
        ({"recipe": {}, "format": "mx"}, "a recipe needs a format"),
    ],
)
def test_values_of_a_file(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FracConfig.from_dict(values)


def test_whole_numbers_are_numbers_too() -> None:
    assert ByLength(epsilon=1, alpha=0).epsilon == 1 and FracConfig(targets=[2]).targets is not None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GateConfig(hidden="16"), "gate.hidden='16' must be a whole number"),  # type: ignore[arg-type]
        (lambda: GateConfig(dims=32), "gate.dims=32 must be a list"),  # type: ignore[arg-type]
        (lambda: TrainSettings(epochs="ten"), "epochs='ten' must be a whole number"),  # type: ignore[arg-type]
        (lambda: CostTargets(3.0), r"targets=3\.0 must be a list"),  # type: ignore[arg-type]
        (lambda: PrecisionStages(None), "stages=None must be a list"),  # type: ignore[arg-type]
        (lambda: FracConfig().replace(**{"run.lenght": 3}), "no field 'lenght'.*'length'"),
        (lambda: FracConfig.paper("dfq", target=3.0), "no field 'target'.*'targets'"),
        (lambda: RunSettings(image_size=0), "image_size=0 must be at least 1"),
        (lambda: RunSettings(train={"epochs": 3}), "must be a TrainSettings"),  # type: ignore[arg-type]
    ],
)
def test_other_settings(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_engine_and_the_summary() -> None:
    engine = Engine(fractrainify(Residual(), config=FracConfig(method="pfq"), example_inputs=(X,)))
    states: list[Any] = [{}, None]
    for state in states:
        with pytest.raises(RunError, match="lacks stage, schedule, ledger"):
            engine.load_state_dict(state)
    with pytest.raises(InputError, match="not a float"):
        engine.loss(0.5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"summarize\(fractrainify\(model\)\)"):
        summarize(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"draw\(fractrainify\(model\)\)"):
        draw(nn.Linear(2, 2), "model.dot")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"schedule=3 has no method update\(\)"):
        Engine(engine.model, schedule=3)  # type: ignore[arg-type]


def test_precisions_of_a_rewritten_model() -> None:
    model = fractrainify(Residual(), config=FracConfig(method="static"), example_inputs=(X,))
    model.set_precision("4/6")
    model(X)
    assert model.cost.fw == pytest.approx(16 / 1024)
    with pytest.raises(ConfigError, match="FW-0/BW-0 computes nothing"):
        model.set_precision("0/0")


def test_a_batch_axis_that_no_input_has() -> None:
    with pytest.raises(ConfigError, match="batch_axis=2 names a dimension that no example input has"):
        fractrainify(Residual(), config=FracConfig(run=RunConfig(batch_axis=2)), example_inputs=(X,))


@pytest.mark.parametrize(
    ("name", "kind"), [("bert-base-uncased", "bert"), ("openai-community/gpt2-large", "gpt2"), ("t5-small", "t5")]
)
def test_names_of_weights_are_told_from_types(name: str, kind: str) -> None:
    with pytest.raises(ModelError, match=rf"names weights.* write hf:{kind}, or"):
        build_model(f"hf:{name}")
