"""What a run cost: the options really chosen, summed by stage, block, op and path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fractrain_fx import Engine, FracModel, Pin, Precision, RunConfig, summarize
from fractrain_fx.config import ProductRecipe, Recipe
from fractrain_fx.engine import EpochRow
from fractrain_fx.hardware.bitfusion import convolution, training_step
from fractrain_fx.hardware.bitfusion_machine import BitFusion
from fractrain_fx.hardware.catalogue import find_machine
from fractrain_fx.hardware.machine import Machine
from fractrain_fx.hardware.run_cost import RunCost, StepPrices, run_cost
from tests.build import rewritten
from tests.hardware.trained import BATCH, METHODS, trained


def cost(model: FracModel, engine: Engine) -> RunCost:
    return run_cost(StepPrices(model, BATCH), engine.ledger.rows)


@pytest.mark.parametrize(("method", "fields"), METHODS, ids=[name for name, _ in METHODS])
def test_bit_operations_are_those_of_the_engines_ledger(method: str, fields: dict[str, object]) -> None:
    model, engine = trained(method, **fields)
    spent = cost(model, engine)
    full = sum(sum(op.training_macs) for op in model.ops)
    # 1e-5: the ledger's shares were summed in float32 on the way
    assert spent.total.macs == pytest.approx(engine.ledger.mean_cp_total * full * engine.ledger.samples, rel=1e-5)
    assert spent.samples == engine.ledger.samples
    for key in ("stage", "block", "op", "path"):
        parts = spent.by(key).values()
        for name in ("macs", "seconds", "joules"):
            assert sum(getattr(part, name) for part in parts) == pytest.approx(getattr(spent.total, name))
    steered = sum(sum(op.training_macs) for op in model.ops if op.precision.mode in ("gated", "scheduled"))
    assert spent.steered.macs == pytest.approx(engine.ledger.mean_cp * steered * spent.samples, rel=1e-5)


def test_elements_of_floating_point_are_counted_and_have_no_price() -> None:
    model, engine = trained("static", format="mx", precision="FW-4/BW-8")
    spent = cost(model, engine)
    assert set(spent.unpriced) == {op.name for op in model.ops}
    assert spent.steered.macs > 0 and spent.total.seconds == spent.total.joules == 0
    integers, trained_so = trained("static", precision="FW-4/BW-8")
    assert spent.total.macs == cost(integers, trained_so).total.macs


def test_static_layers_are_priced_as_the_three_convolutions_of_a_batch() -> None:
    model, engine = trained("static", precision="FW-4/BW-8", pins=(Pin.parse("first=8/8"),))
    spent = cost(model, engine)
    inner = training_step(3, 8, 1, 8, 8, BATCH, a_bits=4, w_bits=4, g_bits=8)
    stem = training_step(3, 8, 1, 3, 8, BATCH, a_bits=8, w_bits=8, g_bits=8, first=True)
    head = training_step(1, 1, 1, 8, 4, BATCH, a_bits=32, w_bits=32, g_bits=32)
    for name, step in (("block.0", inner), ("stem", stem), ("head", head)):
        assert spent.by("op")[name].seconds == pytest.approx(3 * step.seconds)
        assert spent.by("op")[name].joules == pytest.approx(3 * step.energy_nj / 1e9)
    assert head.fw.passes == 16
    assert spent.steered.seconds == pytest.approx(spent.by("op")["block.0"].seconds + spent.by("op")["block.3"].seconds)


def test_a_pfq_run_is_split_by_its_stages_and_an_earlier_one_is_cheaper() -> None:
    model, engine = trained("pfq", schedule="manual", run=RunConfig(length=3), stages="FW(3,4,8)/BW(6,6,8)")
    stages = cost(model, engine).by("stage")
    assert list(stages) == ["1: FW-3/BW-6", "2: FW-4/BW-6", "3: FW-8/BW-8"]
    macs = [stage.macs for stage in stages.values()]
    assert macs == sorted(macs)


def test_samples_that_skip_cost_nothing_and_the_rest_by_their_options() -> None:
    model, _ = trained("dfq")
    prices = StepPrices(model, BATCH)

    (name,) = (block.name for block in model.blocks if block.gated)

    def of(shares: tuple[float, ...]) -> RunCost:
        row = EpochRow(1, 0, "cp 3 %", 1.0, 0.03, 0.03, 0.03, 0.03, 0.03, 100, {name: shares})
        return run_cost(prices, [row])

    options = len(model.frac_config.options)
    only = [of(tuple(float(index == chosen) for index in range(options))).steered for chosen in range(options)]
    assert only[0] == (0, 0, 0)
    half = of((0.5, 0.5) + (0.0,) * (options - 2)).steered
    assert half.macs == pytest.approx(only[1].macs / 2) and half.joules == pytest.approx(only[1].joules / 2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.qkv, self.last = nn.Linear(16, 16), nn.Linear(16, 48), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        q, k, v = self.qkv(x).chunk(3, -1)
        x = (q @ k.transpose(1, 2)).softmax(-1) @ v + x
        return self.last(x)


def test_a_batch_shares_weights_but_no_products_of_two_activations() -> None:
    x = torch.rand(4, 6, 16)
    model = rewritten(Attention(), x, method="static")
    prices = StepPrices(model, 4)
    costs = {op.name: prices.of(op, cost, model.frac_config.precision) for op, cost in prices.ops}
    assert costs["qkv"][0, 1] == pytest.approx(convolution(1, 1, 1, 16, 48, 24, 8, 8).seconds / 4)
    assert costs["matmul"][0, 1] == pytest.approx(convolution(1, 1, 1, 16, 6, 6, 8, 8).seconds)


def test_what_has_no_price_is_named() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 400, padding=199), nn.Conv2d(4, 4, 1))
    model = rewritten(net, torch.rand(2, 3, 8, 8), method="static")
    row = EpochRow(1, 0, "FW-8/BW-8", 1.0, 1, 1, 1, 1, 1, 2, {})
    spent = run_cost(StepPrices(model, 2), [row])
    assert spent.unpriced == ("1",)
    assert spent.by("op")["1"].macs > 0 == spent.by("op")["1"].joules


def linears(**fields: Any) -> FracModel:
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    return rewritten(net, torch.randn(4, 64), method="static", precision=Precision(8, 8), **fields)


class OwnChip(BitFusion):
    """A user's machine: it multiplies integer codes, and its energy has nothing to do with a board's power."""

    name = "own-chip"


MACHINES = [("bitfusion", False), ("zc706", False), (OwnChip(), False), ("h200", True)]


@pytest.mark.parametrize(("machine", "known"), MACHINES, ids=["bitfusion", "zc706", "own", "h200"])
def test_block_formats_have_a_price_where_more_than_integer_codes_are_multiplied(
    machine: str | Machine, known: bool
) -> None:
    model = linears(format="mx")
    prices = StepPrices(model, 4, find_machine(machine))
    for op, cost in prices.ops:
        precision = op.precision.precision or Precision(8, 8)
        assert bool(prices.of(op, cost, precision)[0, 1]) is known  # also of layers that stay float
    assert prices.unpriced == (set() if known else {op.name for op in model.ops})


@pytest.mark.parametrize(("machine", "powered"), [("bitfusion", False), (OwnChip(), False), ("h200", True)])
def test_joules_are_called_an_upper_bound_only_where_they_are_power_times_time(
    machine: str | Machine, powered: bool
) -> None:
    summary = summarize(linears(), machine=machine)
    assert all(step.joules for step in summary.steps)
    assert ("an upper bound" in str(summary)) is powered


def test_each_product_has_the_price_of_its_own_format() -> None:
    def seconds(**fields: Any) -> list[float]:
        prices = StepPrices(linears(**fields), 4, find_machine("b200"))
        (middle,) = ((op, cost) for op, cost in prices.ops if op.name == "2")
        found: list[float] = prices.of(*middle, Precision(8, 8))[:, 1].tolist()
        return found

    mixed = seconds(format="mx", recipe=Recipe("mx", weight_gradient=ProductRecipe(format="int")))
    blocks = seconds(format="mx", recipe="mxfp8")
    assert mixed[:2] == blocks[:2] and mixed[2] != blocks[2]
