"""An allocation trains every op in the number format in which it was measured."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fractrain_fx import AffineConfig, FracConfig, FracModel, Pin, Precision, allocate, fractrainify, sensitivity
from fractrain_fx.config import PrecisionStages, Recipe
from fractrain_fx.config.products import ProductRecipe
from fractrain_fx.config.recipes import RECIPES
from fractrain_fx.numerics.allocation import Allocation, StagedAllocation
from fractrain_fx.numerics.sensitivity import MeasuredOp, Sensitivities, Sensitivity
from fractrain_fx.numerics.sensitivity.rounded import OperandName
from fractrain_fx.training import RunSettings

OWN = Recipe("mx", weight_gradient=ProductRecipe(hadamard=32))
FLOAT, HALF = Precision(32, 32), Precision(16, 16)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    hidden = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.ReLU())]
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), *hidden, nn.Linear(32, 4))


def rows() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(8, 32), torch.randint(4, (8,))) for _ in range(4)]


def rewritten(config: FracConfig) -> FracModel:
    return fractrainify(net(), config=config, example_inputs=(rows()[0][0],))


def forms(model: FracModel) -> dict[str, object]:
    """The number format of every op, whatever bits it has."""
    found: dict[str, object] = {}
    for op in model.ops:
        decision, config = op.precision, model.frac_config
        number_format = decision.format or config.format, decision.recipe_under(config)
        found[op.name] = "float" if decision.mode == "float" or decision.precision == FLOAT else number_format
        if decision.precision == HALF:
            found[op.name] = "bfloat16"
    return found


@pytest.mark.parametrize(
    "config",
    [
        FracConfig(
            method="static",
            format="mx",
            pins=[
                Pin("2", format="float"),
                Pin("4", "FW-8/BW-8", format="affine"),
                Pin("6", format="bfloat16"),
                Pin("8", recipe="mxfp4"),
            ],
            affine=AffineConfig(ranges="sample"),
        ),
        FracConfig(
            method="pfq",
            stages="FW(4,8)/BW(4,8)",
            affine=AffineConfig(ranges="row", gradient_grid="zero"),
            pins=[Pin("2", "FW(4,8)/BW(4,8)", format="mx"), Pin("4", "FW-8/BW-8", recipe=OWN)],
        ),
        FracConfig(method="static", format="nvfp4", precision="FW-4/BW-4", pins=[Pin("first", "8/8", format="affine")]),
        FracConfig(method="pfq", format="mx", stages="FW(4,8)/BW(4,8)", pins=[Pin("4", "6/6", format="dorefa")]),
    ],
    ids=["mx", "row", "nvfp4", "narrow"],
)
def test_every_op_trains_in_the_format_in_which_it_was_measured(config: FracConfig, tmp_path: Path) -> None:
    model = rewritten(config)
    found = sensitivity(model, rows(), criterion=F.cross_entropy)
    found.to_json(tmp_path / "net.json")
    found = Sensitivities.from_json(tmp_path / "net.json")
    chosen: list[Allocation | StagedAllocation] = [allocate(found, 100), allocate(found, [100], stages=1)]
    for allocation in chosen:
        allocation.to_yaml(tmp_path / "net.yaml")
        again = RunSettings.from_yaml(tmp_path / "net.yaml").frac
        assert again == allocation.config.replace(**{"run.length": again.run.length})
        trained = rewritten(again)
        assert forms(trained) == forms(model)
        assert trained.frac_config.affine == config.affine
    trained.train()(rows()[0][0])
    assert 100 * float(trained.cost.cp_total) == pytest.approx(chosen[0].cost, rel=1e-5)  # type: ignore[union-attr]


def test_ops_that_a_rule_keeps_in_float_or_bfloat16_are_not_measured() -> None:
    config = FracConfig(method="static", pins=[Pin("2", format="float"), Pin("4", format="bfloat16")])
    found = sensitivity(net(), rows(), criterion=F.cross_entropy, config=config, precisions=[4, 8])
    assert [op.name for op in found.measured] == ["6", "8"]
    assert {op.name: op.fixed for op in found.ops if op.fixed} == {"0": 32, "2": 32, "4": 16, "10": 32}
    pins = {pin.pattern: pin for pin in allocate(found, "FW-4/BW-4").pins}
    assert pins["2"] == Pin("2", format="float") and pins["4"] == Pin("4", format="bfloat16")


def test_attention_that_stays_float_stays_so() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.body, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.last(torch.relu(self.body(F.scaled_dot_product_attention(x, x, x))))

    batches = [(torch.randn(8, 2, 6, 8), None) for _ in range(4)]
    config = FracConfig(method="static", attention="float")
    found = sensitivity(
        Attends(), batches, criterion=lambda out, _: out.square().mean(), config=config, precisions=[4, 8]
    )
    assert allocate(found, "FW-8/BW-8").config.attention == "float"


@pytest.mark.parametrize(
    "config",
    [
        FracConfig(method="static"),
        FracConfig(
            method="static",
            format="dorefa",
            pins=[Pin("even", "FW-8/BW-8", format="affine")],
            affine=AffineConfig(ranges="row"),
        ),
    ],
    ids=["unfused", "without the format of its rule"],
)
def test_an_op_that_has_no_form_to_be_measured_in_stays_float(config: FracConfig) -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.even = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 2, padding="same")
            self.body, self.last = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.relu(self.body(torch.relu(self.even(torch.relu(self.first(x)))))))

    batches = [(torch.randn(4, 3, 9, 9), None) for _ in range(4)]
    found = sensitivity(
        Padded(), batches, criterion=lambda out, _: out.square().mean(), config=config, precisions=[4, 8]
    )
    assert [op.name for op in found.measured] == ["body"]
    trained = fractrainify(Padded(), config=allocate(found, 100).config, example_inputs=(batches[0][0],))
    assert {op.name: op.precision.precision for op in trained.ops if op.precision.rounds} == {
        "even": FLOAT,
        "body": Precision(8, 8),
    }
    trained.train()(batches[0][0])
    assert 100 * float(trained.cost.cp_total) == pytest.approx(allocate(found, 100).cost, rel=1e-5)


def test_an_op_that_has_the_name_of_a_kind_keeps_its_rule_to_itself() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.body, self.linear, self.last = (nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.relu(self.linear(torch.relu(self.body(torch.relu(self.stem(x)))))))

    model, x = Named(), torch.randn(4, 8)
    names, widths = ("body", "linear"), (4, 8)
    operands: tuple[OperandName, ...] = ("x", "w", "g")
    plan = fractrainify(Named(), config=FracConfig(method="static"), example_inputs=(x,))
    ops = tuple(
        MeasuredOp(op.name, op.kind, op.module, op.training_macs, fixed=None if op.name in names else 32)
        for op in plan.ops
    )
    measured = [
        Sensitivity(name, operand, bits, change=float(name == "body") / bits, noise=0.0)
        for name, operand, bits in product(names, operands, widths)
    ]
    found = Sensitivities(ops, tuple(measured), 1.0, 4)
    allocation = allocate(found, (found.cost("FW-4/BW-4") + found.cost("FW-8/BW-8")) / 2, options=["4/4", "8/8"])
    assert len(set(allocation.precisions.values())) == 2
    trained = fractrainify(model, config=allocation.config, example_inputs=(x,))
    assert {op.name: op.precision.precision for op in trained.ops if op.precision.rounds} == allocation.precisions


def test_stages_have_names_in_the_format_that_was_measured() -> None:
    found = sensitivity(net(), rows(), criterion=F.cross_entropy, config=FracConfig(method="static", format="mx"))
    staged = allocate(found, "FW(4,5,6)/BW(6,6,8)", stages=3)
    assert staged.config.product_recipe == RECIPES["mxfp8"]
    widths = {bits for each in staged.names.stages for bits in (each.fw, each.bw)}
    assert widths <= {4, 6, 8} and len(set(staged.names.stages)) == 3
    assert all(isinstance(pin.precision, Precision | PrecisionStages) for pin in staged.pins)
