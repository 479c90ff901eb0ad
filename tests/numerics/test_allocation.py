"""Allocations: exact, within the budget, and what a model is then trained at."""

from __future__ import annotations

import random
import sys
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fractrain_fx import Engine, FracConfig, Pin, Precision, allocate, fractrainify
from fractrain_fx.errors import ConfigError, MissingPackageError
from fractrain_fx.numerics.allocation import Allocation
from fractrain_fx.numerics.allocation.price import Unit
from fractrain_fx.numerics.allocation.solve import Option, choose
from fractrain_fx.numerics.sensitivity import MeasuredOp, Sensitivities, Sensitivity
from fractrain_fx.numerics.sensitivity.rounded import OperandName
from fractrain_fx.passes import Product
from fractrain_fx.training import RunSettings

WIDTHS = (2, 3, 4, 6, 8)
MACS = {"a": 1000, "b": 3000, "c": 500}
HARM = {"a": 1.0, "b": 0.05, "c": 0.4}


def sensitivities(**changes: Any) -> Sensitivities:
    """Three ops, and one that is not rounded. Errors fall by four for each bit."""
    ops = [MeasuredOp(name, "linear", name, (macs, macs, macs), **changes) for name, macs in MACS.items()]
    ops.append(MeasuredOp("head", "linear", "head", (10, 10, 10), fixed=32))
    rows = []
    for name, scale in HARM.items():
        for bits in WIDTHS:
            error = scale * 4.0**-bits
            rows += [Sensitivity(name, operand, bits, change=error) for operand in ("x", "w")]
            rows.append(Sensitivity(name, "g", bits, noise=0.3 * error))
    return Sensitivities(tuple(ops), tuple(rows), 1.0, 4)


def test_no_other_choice_under_the_budget_harms_less() -> None:
    found = sensitivities()
    for budget in (2.0, 3.5, 5.0):
        allocation = allocate(found, budget, noise_price=0.5)
        options = [Precision(fw, bw) for fw, bw in product((3, 4, 6, 8), (4, 6, 8))]
        best = min(
            sum(found.harm(name, each, 0.5) for name, each in zip(MACS, choice, strict=True))
            for choice in product(options, repeat=3)
            if found.cost(dict(zip(MACS, choice, strict=True))) <= budget
        )
        assert allocation.harm == pytest.approx(best, rel=1e-5)
        assert allocation.cost == pytest.approx(found.cost(allocation.precisions))
        assert allocation.cost <= budget


def test_an_option_of_very_large_harm_does_not_hide_the_others() -> None:
    draw = random.Random(0)
    for _ in range(20):
        groups = []
        for _ in range(6):
            scale = 10 ** draw.uniform(-8, 4)
            harms = [scale * 4.0 ** -(bits * draw.uniform(0.5, 2)) for bits in range(4)]
            groups.append([Option(bits + draw.uniform(0.5, 1.5), harm) for bits, harm in enumerate(harms)])
        least, most = (sum(end(option.cost for option in group) for group in groups) for end in (min, max))
        budget = least + draw.uniform(0.1, 0.9) * (most - least)
        chosen = choose(groups, budget)
        assert sum(group[index].cost for group, index in zip(groups, chosen, strict=True)) <= budget
        choices = (choice for choice in product(*groups) if sum(each.cost for each in choice) <= budget)
        best = min(sum(option.harm for option in choice) for choice in choices)
        assert sum(group[index].harm for group, index in zip(groups, chosen, strict=True)) == pytest.approx(best, 1e-6)


def test_bits_go_where_they_count() -> None:
    chosen = allocate(sensitivities(), "FW-4/BW-6").precisions
    assert chosen["a"].fw > chosen["b"].fw, "20 times the harm at a third of the cost"
    free = allocate(sensitivities(), 100).precisions
    assert set(free.values()) == {Precision(8, 8)}


def test_a_precision_is_a_budget() -> None:
    found = sensitivities()
    allocation = allocate(found, "FW-6/BW-6")
    assert allocation.budget == pytest.approx(found.cost("FW-6/BW-6"))
    assert allocation.harm <= sum(found.harm(name, Precision(6, 6), 0.2) for name in MACS)
    same = allocate(found, "FW-4/BW-6", options=["FW-4/BW-6"])
    assert set(same.precisions.values()) == {Precision(4, 6)}


def test_the_noise_of_gradients_has_a_price() -> None:
    cheap, dear = (allocate(sensitivities(), "FW-4/BW-6", noise_price=price) for price in (0.0, 1e3))
    assert {each.bw for each in cheap.precisions.values()} == {4}
    assert min(each.bw for each in dear.precisions.values()) > 4


@pytest.mark.parametrize(("unit", "machine"), [("seconds", "h200"), ("joules", "bitfusion")])
def test_budgets_of_a_machine(unit: Unit, machine: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())), nn.Linear(64, 4))
    rewritten = fractrainify(model, config=FracConfig(method="static"), example_inputs=(torch.randn(2, 64),))
    ops = tuple(
        MeasuredOp(
            op.name,
            op.kind,
            op.module,
            op.training_macs,
            fixed=None if op.name in ("2", "4") else 32,
            product=op.product,
        )
        for op in rewritten.ops
    )
    operands: tuple[OperandName, ...] = ("x", "w", "g")
    rows = [
        Sensitivity(name, operand, bits, **({"noise": 0.1**bits} if operand == "g" else {"change": 0.1**bits}))
        for name, operand, bits in product(("2", "4"), operands, (4, 8, 16))
    ]
    found = Sensitivities(ops, tuple(rows), 1.0, 4)
    wide = allocate(found, "FW-16/BW-16", unit, machine=machine, batch=4096)
    narrow = allocate(found, "FW-8/BW-8", unit, machine=machine, batch=4096)
    assert 0 < narrow.cost <= narrow.budget <= wide.budget
    assert narrow.harm >= wide.harm
    with pytest.raises(ConfigError, match="needs a machine"):
        allocate(found, 1.0, unit)


@pytest.mark.parametrize(
    ("change", "words"), [({"format": "mx"}, "format 'mx' has no integer codes"), ({}, "its sizes are not known")]
)
def test_a_machine_without_a_price_for_an_op_is_refused(change: dict[str, Any], words: str) -> None:
    shape = Product(1, 1, 1, 1, 64, 64) if change else None
    found = sensitivities(product=shape, **change)
    with pytest.raises(
        ConfigError, match=f"'bitfusion' has no price for 'a' \\({words}\\), 'b' .*write another machine"
    ):
        allocate(found, "FW-4/BW-4", "joules", machine="bitfusion")


def test_a_model_is_trained_at_the_allocation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.ReLU())), nn.Linear(8, 4))
    x = torch.randn(4, 8)
    found = fractrainify(model, config=FracConfig(method="static"), example_inputs=(x,))
    ops = tuple(
        MeasuredOp(op.name, op.kind, op.module, op.training_macs, fixed=32 if op.precision.mode == "float" else None)
        for op in found.ops
    )
    names = [op.name for op in ops if op.fixed is None]
    rows = [Sensitivity(n, o, b, change=0.5**b * int(n), noise=0.1**b) for n, o, b in product(names, "xwg", WIDTHS)]  # type: ignore[arg-type]
    found_rows = Sensitivities(ops, tuple(rows), 1.0, 4)
    allocation = allocate(found_rows, "FW-4/BW-6")
    allocation.to_yaml(tmp_path / "net.yaml")
    config = RunSettings.from_yaml(tmp_path / "net.yaml").frac
    assert config.pins == allocation.pins
    trained = fractrainify(model, config=config, example_inputs=(x,))
    trained.train()(x)
    assert {op.name: op.precision.precision for op in trained.ops if op.name in names} == allocation.precisions
    assert 100 * float(trained.cost.cp_total) == pytest.approx(allocation.cost, rel=1e-5)
    staged = allocate(found_rows, "FW(3,4,8)/BW(4,6,8)", stages=3)
    staged.to_yaml(tmp_path / "staged.yaml")
    config = RunSettings.from_yaml(tmp_path / "staged.yaml").frac
    assert config.pins == staged.pins == staged.config.pins and config.stages == staged.names
    trained = fractrainify(model, config=config.replace(schedule="manual"), example_inputs=(x,)).train()
    engine = Engine(trained, epochs=3)
    for stage in staged.stages:
        engine.loss(trained(x).mean()).backward()
        bits = {op.name: str(op.precision) for op in trained.ops if op.name in names}
        assert bits == {name: str(each) for name, each in stage.precisions.items()}
        assert 100 * float(trained.cost.cp_total) == pytest.approx(stage.cost, rel=1e-5)
        engine.end_epoch()


def test_each_stage_is_the_best_choice_below_the_next_one() -> None:
    found = sensitivities()
    staged = allocate(found, (2.0, 3.0, 5.0), stages=3, noise_price=0.5)
    assert staged.stages[-1] == allocate(found, 5.0, noise_price=0.5)
    options = [Precision(fw, bw) for fw, bw in product((3, 4, 6, 8), (4, 6, 8))]
    for stage, after in pairwise(staged.stages):
        below = after.precisions.values()
        best = min(
            sum(found.harm(name, each, 0.5) for name, each in zip(MACS, choice, strict=True))
            for choice in product(options, repeat=3)
            if found.cost(dict(zip(MACS, choice, strict=True))) <= stage.budget
            and all(low.fw <= high.fw and low.bw <= high.bw for low, high in zip(choice, below, strict=True))
        )
        assert stage.harm == pytest.approx(best, rel=1e-5)
        assert stage.cost <= stage.budget
    assert [stage.budget for stage in staged.stages] == [2.0, 3.0, 5.0]


def test_budgets_of_stages_rise_to_the_last_or_are_those_of_given_precisions() -> None:
    found = sensitivities()
    staged = allocate(found, "FW-8/BW-8", stages=4)
    rises = [after.budget - before.budget for before, after in pairwise(staged.stages)]
    assert rises == pytest.approx([rises[0]] * 3) and rises[0] > 0
    assert set(staged.stages[-1].precisions.values()) == {Precision(8, 8)}
    stages = "FW(3,4,6,8)/BW(6,6,8,8)"
    paper = allocate(found, stages, stages=4)
    assert str(paper.names) == stages
    for name, stage in zip(paper.names.stages, paper.stages, strict=True):
        assert stage.budget == pytest.approx(found.cost(name))
        assert stage.harm <= sum(found.harm(op, name, 0.2) for op in MACS)


def test_the_op_that_is_hurt_most_is_raised_first() -> None:
    first = allocate(sensitivities(), "FW-8/BW-8", stages=4).stages[0].precisions
    assert first["a"].fw > first["b"].fw, "20 times the harm at a third of the cost"


def test_names_are_matched_literally() -> None:
    ops = tuple(MeasuredOp(name, "linear", module, (1, 1, 1)) for name, module in (("a.b[0]", "a"), ("a", "")))
    bits = {"a.b[0]": Precision(4, 4), "a": Precision(8, 8)}
    odd = Allocation(bits, Sensitivities(ops, (), 1.0, 4), 1, 1, "cp", 0)
    assert odd.pins == (Pin("a", Precision(8, 8)), Pin("a.b[[]0]", Precision(4, 4))), "that of the module comes first"


def test_the_table_fits_80_columns() -> None:
    text = f"{allocate(sensitivities(), 'FW-4/BW-6')}{allocate(sensitivities(), 'FW-8/BW-8', stages=7)}"
    assert max(map(len, text.splitlines())) <= 80
    assert "% of training at 32 bits" in text


@pytest.mark.parametrize(
    ("budget", "arguments", "words"),
    [
        (0.1, {}, "is below the 1.294"),
        (0, {}, "must be a number above 0"),
        ("four", {}, "is not a precision"),
        (3.0, {"unit": "watts"}, "unit='watts' is unknown"),
        (3.0, {"machine": "h200"}, "changes nothing for unit='cp'"),
        (3.0, {"options": ["FW-5/BW-6"]}, "was not measured at 5 bits"),
        (3.0, {"noise_price": -1}, "must be 0 or more"),
        (3.0, {"stages": 0}, "stages=0 must be a whole number"),
        ([2.0, 3.0], {"stages": 3}, "or 3 of them, one a stage"),
        ([3.0, 2.0], {"stages": 2}, "budgets fall from stage 1"),
        ([2.2, 6.0], {"stages": 2, "options": ["3/8", "8/4"]}, "stage 1 costs at least"),
        ("FW-8/BW-8", {"stages": 3, "options": ["4/4", "8/8"]}, "2 precisions cannot name 3 stages"),
        ([2.0, 3.0], {}, "must be a number above 0"),
    ],
)
def test_mistakes_are_named(budget: Any, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        allocate(sensitivities(), budget, **arguments)


def test_scipy_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"fractrain_fx\[allocate\]"):
        allocate(sensitivities(), 3.0)
