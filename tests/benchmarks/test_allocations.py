"""Widths for trainings under a budget, as a command found them."""

from __future__ import annotations

import pytest

from benchmarks.science.allocations import (
    FOLDER,
    allocated_settings,
    settings_under,
    settings_with_outer,
    settings_with_samples,
)
from benchmarks.science.grid import GRIDS, Run
from fractrain_fx import Pin, Precision
from fractrain_fx.config import FracConfig
from fractrain_fx.errors import ConfigError
from fractrain_fx.numerics.sensitivity import Sensitivities
from fractrain_fx.training import RunSettings

TASKS = ("characters", "resnet20-16px")


def measured(task: str) -> Sensitivities:
    return Sensitivities.from_json(FOLDER / f"{task}.json")


@pytest.mark.parametrize("task", TASKS)
def test_the_settings_are_those_of_the_measured_sensitivities(task: str) -> None:
    expected = settings_under(measured(task), task) | settings_with_outer(measured(f"{task}-outer"), task)
    if task == "resnet20-16px":
        expected |= settings_with_samples(measured(f"{task}-outer-samples"), task)
    assert allocated_settings(task) == expected


@pytest.mark.parametrize("task", TASKS)
def test_every_setting_keeps_its_budget(task: str) -> None:
    full = measured(task).cost("FW-8/BW-8")
    for name, values in allocated_settings(task).items():
        found = measured(f"{task}{'-outer' * ('outer' in name)}{'-samples' * ('samples' in name)}")
        config = RunSettings.from_dict({"method": "static", **values}).frac
        costs = []
        for stage in range(len(config.stages.stages) if config.method == "pfq" else 1):
            own = {pin.pattern: pin.stages[stage] for pin in config.pins}
            bits = {op.name: own.get(op.name, config.precision) for op in found.measured}
            costs.append(100 * found.cost(bits) / full)
        budget = int(name.rpartition("-")[2])
        assert costs == sorted(costs)
        assert budget - 10 < sum(costs) / len(costs) < budget + 0.5
        if name.startswith("ends-high"):
            assert bits[found.measured[0].name] == bits[found.measured[-1].name] == Precision(8, 8)
        if name.startswith("uniform-outer"):
            assert set(own.values()) == {config.precision} and set(own) <= {"first", "last"}


def test_outer_layers_are_float_unless_they_were_measured() -> None:
    for task, outer in zip(TASKS, (["lm_head"], ["conv1", "fc"]), strict=True):
        assert [op.name for op in measured(task).ops if op.fixed == 32] == outer
        assert not [op.name for op in measured(f"{task}-outer").ops if op.fixed == 32]


def test_the_grid_has_them_for_three_seeds() -> None:
    runs = GRIDS["allocated"]
    assert {run.seed for run in runs} == {0, 1, 2}
    run = next(run for run in runs if run.task == "resnet20-16px" and run.setting == "allocated-40")
    config = RunSettings.from_dict(run.values).frac
    assert isinstance(config, FracConfig) and config.method == "static"
    assert all(isinstance(pin, Pin) for pin in config.pins) and len(config.pins) == 20


def test_a_task_without_allocations_says_so() -> None:
    with pytest.raises(ConfigError, match="'allocated-40' is unknown"):
        assert Run("resnet38", "static", "allocated-40").values
