"""What a run would take on machines: sums over its steps, its stages and its options, and what has no price."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from fractrain_fx import FracConfig, plan
from fractrain_fx.config import ProductRecipe, Recipe
from fractrain_fx.engine import EpochRow
from fractrain_fx.hardware.machine import Choice, Machine
from fractrain_fx.hardware.plan import plan_steps
from fractrain_fx.hardware.roofline import Roofline
from fractrain_fx.hardware.run_cost import StepPrices, run_cost
from fractrain_fx.hardware.run_machines import PRICED, MachineRun, price_run
from fractrain_fx.hardware.traffic import traffic_of
from fractrain_fx.model import FracModel
from fractrain_fx.zoo.models import resnet38
from tests.build import rewritten
from tests.hardware.trained import BATCH, METHODS, trained

BOARD = Roofline("board", "", {"float32": 2e9, "bfloat16": 4e9, "int8": 8e9}, 1e9, watts=2.0)

Shares = dict[str, tuple[float, ...]]


def row(epoch: int, level: str, samples: int, shares: Shares | None = None, stage: int = 0) -> EpochRow:
    return EpochRow(epoch, stage, level, 1.0, 1, 1, 1, 1, 1, samples, shares or {})


def priced(model: FracModel, *rows: EpochRow, machine: str | Machine = BOARD) -> MachineRun:
    (found,) = price_run(model, rows, BATCH, [machine])
    return found


def static(precision: str = "FW-8/BW-8", **fields: Any) -> FracModel:
    return rewritten(ToyNet(), torch.rand(2, 3, 8, 8), method="static", precision=precision, **fields)


class ToyNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3), nn.Linear(8, 4)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.norm(self.middle(self.first(x).relu())).mean((2, 3)))
        return y


def test_a_run_at_one_precision_takes_its_steps_as_a_plan_has_them() -> None:
    run = priced(static(), row(1, "FW-8/BW-8", 3 * BATCH), row(2, "FW-8/BW-8", 2 * BATCH))
    config = FracConfig.from_dict({"method": "static", "precision": "FW-8/BW-8"})
    x = torch.rand(2, 3, 8, 8)
    planned = plan(ToyNet(), config=config, example_inputs=(x,), machine=BOARD, batch=BATCH)
    steps = {each.precision: each for each in planned.steps}
    step = steps["FW-8/BW-8"]
    assert step.seconds is not None and run.seconds == pytest.approx(5 * step.seconds)
    assert run.joules == pytest.approx(5 * 2.0 * step.seconds)
    float32, bfloat16 = steps["float32"].seconds, steps["bfloat16"].seconds
    assert float32 is not None and run.float32 == pytest.approx(5 * float32)
    assert bfloat16 is not None and run.bfloat16 == pytest.approx(5 * bfloat16)
    assert run.bounds == pytest.approx(step.bounds) and sum(run.bounds.values()) == pytest.approx(1)
    assert not run.contractions_only and run.unpriced == () and run.wider == ()


def test_a_rewritten_model_has_the_traffic_of_the_planned_one() -> None:
    model = static()
    steps = plan_steps(model, BOARD, 4)
    x = torch.rand(2, 3, 8, 8)
    planned = plan(ToyNet(), config=model.frac_config, example_inputs=(x,), machine=BOARD, batch=4).steps
    assert [step.seconds for step in steps] == pytest.approx([step.seconds for step in planned])
    assert {each.name for each in traffic_of(model._state.recording.train)} == {"relu", "norm", "mean"}


@pytest.mark.parametrize(("method", "fields"), METHODS, ids=[name for name, _ in METHODS])
def test_on_bitfusion_it_is_the_cost_of_the_run(method: str, fields: dict[str, Any]) -> None:
    model, engine = trained(method, **fields)
    (run,) = price_run(model, engine.ledger.rows, BATCH, ["bitfusion"])
    total = run_cost(StepPrices(model, BATCH), engine.ledger.rows).total
    assert (run.seconds, run.joules) == pytest.approx((total.seconds, total.joules))
    assert run.contractions_only and run.bfloat16 is None and run.float32 is not None
    assert (run.seconds == pytest.approx(run.float32)) == (method == "float")


def test_stages_and_options_add_up_by_their_samples() -> None:
    model, _ = trained("dfq")
    (block,) = (each.name for each in model.blocks if each.gated)
    options = len(model.frac_config.gate_options)

    def of(*chosen: tuple[int, int]) -> float:
        rows = [
            row(at, "cp 3 %", samples, {block: tuple(float(index == option) for index in range(options))})
            for at, (option, samples) in enumerate(chosen, start=1)
        ]
        seconds = priced(model, *rows).seconds
        assert seconds is not None
        return seconds

    assert of((1, BATCH), (options - 1, 3 * BATCH)) == pytest.approx(of((1, BATCH)) + 3 * of((options - 1, BATCH)))
    assert of((0, BATCH)) < of((1, BATCH))


def test_samples_that_skip_leave_out_the_norms_of_their_block() -> None:
    model = rewritten(resnet38(), torch.rand(2, 3, 32, 32), method="slu")
    gated = [block.name for block in model.blocks if block.gated]
    full: Shares = dict.fromkeys(gated, (0.0, 1.0))
    none: Shares = dict.fromkeys(gated, (1.0, 0.0))
    moving = Roofline("moving", "", {"float32": 1e30}, 1e9)  # products take no time beside their traffic
    kept, skipped = (priced(model, row(1, "cp 50 %", BATCH, shares), machine=moving) for shares in (full, none))
    assert kept.seconds is not None and skipped.seconds is not None
    work = [each for each in traffic_of(model._state.recording.train) if "add" not in each.name]
    whole = moving.step(work, {each.name: (Choice(),) for each in work}, batch=BATCH).seconds
    assert skipped.seconds < kept.seconds - 0.8 * whole
    assert kept.float32 is not None and skipped.float32 == kept.float32 > kept.seconds * 0.999


def test_precisions_without_units_are_named() -> None:
    assert priced(static("FW-4/BW-8"), row(1, "FW-4/BW-8", BATCH)).wider == ("FW-4/BW-8",)
    model, _ = trained("dfq")
    shares: Shares = {block.name: (0.5, 0.5, *[0.0] * 5) for block in model.blocks if block.gated}
    assert priced(model, row(1, "cp 3 %", BATCH, shares)).wider == (str(model.frac_config.gate_options[1]),)


def test_a_float_run_is_in_float32_where_others_have_bfloat16() -> None:
    model, engine = trained("float")
    run = price_run(model, engine.ledger.rows, BATCH, [BOARD])[0]
    assert run.seconds == run.float32 and run.float32 is not None and run.bfloat16 is not None
    assert run.bfloat16 < run.float32


def test_a_machine_without_a_price_for_what_is_steered_gives_no_number() -> None:
    model = static("FW-8/BW-8", format="mx")
    run = priced(model, row(1, "FW-8/BW-8", BATCH), machine="bitfusion")
    assert (run.seconds, run.joules, run.float32) == (None, None, None) and "middle" in run.unpriced
    assert priced(model, row(1, "FW-8/BW-8", BATCH), machine="b200").seconds is not None


def test_each_product_is_priced_in_its_own_format() -> None:
    def of(format: str, recipe: str | Recipe) -> float:
        model = static("FW-4/BW-4", format=format, recipe=recipe)
        seconds = priced(model, row(1, "FW-4/BW-4", BATCH), machine="b200").seconds
        assert seconds is not None
        return seconds

    nvfp4 = ProductRecipe(format="nvfp4")
    assert of("mx", Recipe("mx", nvfp4, nvfp4, nvfp4)) == of("nvfp4", "nvfp4")
    # Twice as many scales are written, and what the other products rounded is rounded once more.
    assert of("mx", Recipe("mx", weight_gradient=nvfp4)) > of("mx", "mxfp8")


def test_floats_are_of_the_ops_that_have_a_price() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 400, padding=199), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 1))
    x = torch.rand(2, 3, 8, 8)
    model = rewritten(net, x, method="static")
    run = priced(model, row(1, "FW-8/BW-8", BATCH), machine="bitfusion")
    assert run.unpriced == ("1",)
    assert run.seconds is not None and run.float32 is not None and run.float32 < 20 * run.seconds


def test_a_run_without_an_epoch_has_no_price_and_machines_are_those_with_figures() -> None:
    assert price_run(static(), [], BATCH) == ()
    found = price_run(static(), [row(1, "FW-8/BW-8", BATCH)], BATCH)
    assert tuple(run.machine for run in found) == PRICED and "cpu" not in PRICED and len(PRICED) == 10
    assert {run.machine for run in found if run.joules is None} == {"zc706"}


def test_pricing_resnet38_at_every_option_takes_about_a_second() -> None:
    model = rewritten(resnet38(), torch.rand(2, 3, 32, 32), method="fractrain")
    options = len(model.frac_config.gate_options)
    shares = {block.name: tuple([1 / options] * options) for block in model.blocks if block.gated}
    rows = [row(each, "cp 3 %", 50_000, shares, each - 1) for each in (1, 2, 3)]
    run_cost(StepPrices(model, 128), rows)  # as training has done in its epochs
    started = time.perf_counter()
    price_run(model, rows, 128)
    assert time.perf_counter() - started < 3  # 0.5 s on two busy cores
