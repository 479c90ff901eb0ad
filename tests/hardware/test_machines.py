"""Machines: what they support, what a step takes by hand, and what a plan on one says."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn

from fractrain_fx import Pin, plan
from fractrain_fx.config.precision import FULL, SKIP, Precision
from fractrain_fx.errors import ConfigError
from fractrain_fx.hardware import Choice, Machine, Traffic
from fractrain_fx.hardware.accelerators import ACCELERATORS
from fractrain_fx.hardware.bitfusion import training_step
from fractrain_fx.hardware.catalogue import MACHINES, find_machine, machine_rows
from fractrain_fx.hardware.machine import PATHS
from fractrain_fx.hardware.measured import cpu_of, probes
from fractrain_fx.hardware.roofline import Roofline
from fractrain_fx.hardware.traffic import traffic_of
from fractrain_fx.hardware.zc706 import ZC706
from fractrain_fx.passes import Op, Product
from fractrain_fx.summary import Summary
from fractrain_fx.summary.machines import step_lines
from tests.build import paper, rewritten
from tests.training.tiny import TinyNet

EIGHT = Precision(8, 8)
# Round numbers: 1 MAC a microsecond in float32, 4 in codes; 1 byte a microsecond.
PLAIN = Roofline("plain", "a made-up board", {"float32": 2e6, "bfloat16": 4e6, "int8": 8e6}, 1e6, watts=2.0)


def linear(inputs: int = 8, outputs: int = 4, rows: int = 3, shared: bool = True) -> Op:
    product = Product(1, 1, 1, 1, inputs, outputs, rows=rows, shared=shared)
    return Op("op", "linear", "", product.macs, product=product)


def priced(machine: Machine, op: Op, choice: Choice, batch: int = 1) -> dict[str, float]:
    cost = machine.step([op], {"op": (choice,)}, batch=batch)
    return {path: 1e6 * part.seconds for path, part in cost.ops["op"].parts.items()}


def test_operands_have_at_least_the_fewest_bits_and_a_skipped_product_has_none() -> None:
    choice = Choice(Precision(4, 8), weight_bits=6, least=(0, 0, 16))
    assert [choice.bits(path) for path in PATHS] == [(4, 6), (8, 6), (16, 16)]
    assert Choice(Precision(4, 8)).bits("GC") == (8, 4)
    assert {Choice(SKIP, least=(16, 16, 16)).bits(path) for path in PATHS} == {(0, 0)}


def test_a_product_takes_the_longer_of_its_arithmetic_and_its_traffic() -> None:
    macs, x, w, y = 2 * 3 * 8 * 4, 2 * 3 * 8, 8 * 4, 2 * 3 * 4
    moved = 4 * (x + w + y)
    assert moved > macs
    assert priced(PLAIN, linear(), Choice(), batch=2) == pytest.approx(dict.fromkeys(("FW", "EB", "GC"), moved))
    wide = linear(100, 100, 100)
    cost = PLAIN.step([wide], {"op": (Choice(),)})
    assert cost.seconds == pytest.approx(3.0) and cost.joules == pytest.approx(6.0)
    assert cost.ops["op"].bound == "compute"


def test_rounding_is_traffic_of_its_own_and_each_operand_is_rounded_once() -> None:
    x, w, y = 24, 32, 12
    # a value is read twice as float32 and written as a byte; results are float32
    rounded = 2 * 4 + 1
    expected = {
        "FW": (x + w) * rounded + max(x * 4 / 4, x + w + 4 * y),
        "EB": y * rounded + y + w + 4 * x,
        "GC": x + y + 4 * w,
    }
    assert priced(PLAIN, linear(), Choice(EIGHT)) == pytest.approx(expected)
    assert PLAIN.step([linear()], {"op": (Choice(EIGHT),)}).ops["op"].bound == "rounding"


def test_values_are_rounded_too_where_codes_run_as_floats() -> None:
    floats = Roofline("floats", "", {"float32": 2e6}, 1e6)
    plain, rounded = (priced(floats, linear(), Choice(each)) for each in (FULL, EIGHT))
    extra = {path: rounded[path] - plain[path] for path in plain}
    # two reads and a write of 4 bytes, of activations and weights and later of the error
    assert extra == pytest.approx({"FW": (24 + 32) * 12, "EB": 12 * 12, "GC": 0})


def test_under_autocast_weights_are_cast_once_and_results_have_16_bits() -> None:
    x, w, y = 24, 32, 12
    expected = {"FW": w * (4 + 2) + 2 * (x + w + y), "EB": 2 * (x + w + y), "GC": 2 * (x + y) + 4 * w}
    assert priced(PLAIN, linear(), Choice(floats="bfloat16")) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "precision", "format", "kind", "native"),
    [
        ("h200", EIGHT, "affine", "int8", True),
        ("h200", Precision(4, 4), "affine", "int8", False),
        ("a100", Precision(4, 4), "affine", "int4", True),
        ("h200", Precision(10, 10), "affine", "float16", False),
        ("h200", Precision(16, 16), "affine", "float32", False),
        ("h200", EIGHT, "fp8", "fp8", True),
        ("a100", EIGHT, "fp8", "bfloat16", False),
        ("b200", Precision(4, 4), "nvfp4", "nvfp4", True),
        ("h200", Precision(4, 4), "nvfp4", "bfloat16", False),
        ("b200", EIGHT, "mx", "mxfp8", True),
        ("l4", FULL, "affine", "float32", True),
    ],
)
def test_what_a_machine_lacks_runs_at_the_next_wider_type(
    name: str, precision: Precision, format: str, kind: str, native: bool
) -> None:
    machine = find_machine(name)
    assert isinstance(machine, Roofline)
    assert machine.type_of(precision.fw, format) == kind
    assert machine.supports(precision, format) is native


def test_convolutions_have_a_peak_of_their_own_where_one_is_known() -> None:
    machine = Roofline("mine", "", {"float32": 1.0, "int8": 4.0}, 1e12, convolution={"float32": 2.0})
    for kind, times in (("linear", 1), ("conv", 2)):
        op = replace(linear(), kind=kind)
        assert priced(machine, op, Choice(FULL)) == pytest.approx(
            {path: each / times for path, each in priced(machine, linear(), Choice(FULL)).items()}
        )
        assert priced(machine, op, Choice(EIGHT)) == pytest.approx(priced(machine, linear(), Choice(EIGHT)))
    with pytest.raises(ConfigError, match="float64"):
        Roofline("bad", "", {"float32": 1}, 1, convolution={"float64": 1})


def test_traffic_adds_up_where_it_is_not_hidden_and_convolutions_move_more_than_once() -> None:
    hides, adds = PLAIN, replace(PLAIN, overlaps=False, convolution={"float32": 1e6}, convolution_passes=3)
    wide = linear(40, 100, 100)
    macs, moved = 40 * 100 * 100, 4 * (100 * 40 + 40 * 100 + 100 * 100)
    assert priced(hides, wide, Choice()) == pytest.approx(dict.fromkeys(("FW", "EB", "GC"), max(macs, moved)))
    assert priced(adds, wide, Choice()) == pytest.approx(dict.fromkeys(("FW", "EB", "GC"), macs + moved))
    convolution = replace(wide, kind="conv")
    assert priced(adds, convolution, Choice())["FW"] == pytest.approx(2 * macs + 3 * moved)
    # codes have no convolutions of their own here: they run as products
    assert priced(adds, convolution, Choice(EIGHT)) == pytest.approx(priced(adds, wide, Choice(EIGHT)))


def test_samples_that_take_several_options_or_skip_are_priced_by_their_shares() -> None:
    mix = (Choice(SKIP, share=0.5), Choice(EIGHT, share=0.25), Choice(share=0.25))
    half = PLAIN.step([linear()], {"op": mix}, batch=4).seconds
    parts = [PLAIN.step([linear()], {"op": (Choice(each),)}, batch=4).seconds for each in (EIGHT, FULL)]
    assert half == pytest.approx(sum(parts) / 4)
    nothing = PLAIN.step([linear()], {"op": (Choice(SKIP),)})
    assert nothing.seconds == 0 and nothing.ops["op"].bound is None


def test_bitfusion_is_a_machine_with_its_own_numbers() -> None:
    bitfusion = find_machine("bitfusion")
    op = linear(16, 32, 10)
    cost = bitfusion.step([op, Traffic("norm", 5.0)], dict.fromkeys(("op", "norm"), (Choice(EIGHT),)), batch=4)
    run = training_step(1, 1, 1, 16, 32, 40, a_bits=8, w_bits=8, g_bits=8, I=1)
    assert cost.seconds == pytest.approx(run.seconds) and cost.joules == pytest.approx(run.energy_nj / 1e9)
    assert list(cost.ops) == ["op"]  # nothing but contractions has a price
    assert bitfusion.supports(EIGHT, "affine")
    assert not bitfusion.supports(Precision(3, 6), "affine") and not bitfusion.supports(FULL, "affine")


def test_the_zc706_takes_time_in_proportion_to_the_bits_of_both_operands() -> None:
    op = linear(512, 512, 512)
    eight, four = (priced(ZC706(), op, Choice(Precision(bits, 8), weight_bits=4)) for bits in (8, 4))
    assert four["FW"] / eight["FW"] == pytest.approx(8 / 12) and four["GC"] / eight["GC"] == pytest.approx(12 / 16)
    # 900 slices, two products of 8 bits in a cycle of 200 MHz; floats are four passes of 16 bits
    assert priced(ZC706(), op, Choice(EIGHT))["FW"] == pytest.approx(512**3 / 360e9 * 1e6)
    assert priced(ZC706(), op, Choice())["FW"] == pytest.approx(8 * 512**3 / 360e9 * 1e6)
    assert ZC706().step([op], {"op": (Choice(),)}).joules is None


@pytest.mark.parametrize("name", ["bitfusion", "zc706"])
def test_machines_of_integer_codes_have_no_price_for_formats_with_scales_inside_a_sum(name: str) -> None:
    def known(choice: Choice) -> bool:
        return "op" in find_machine(name).step([linear()], {"op": (choice,)}).ops

    assert known(Choice(EIGHT)) and known(Choice(FULL, format="mx"))
    assert not known(Choice(EIGHT, format="mx"))
    assert not known(Choice(EIGHT, formats=("affine", "affine", "mx")))


def test_a_plan_compares_a_precision_with_float32_for_the_same_work() -> None:
    pin = Pin("block.0", EIGHT, format="mx")  # which has no price on this machine
    float32, eight = planned(TinyNet(4), "static", "bitfusion", pins=(pin,)).steps
    assert "block.0" in eight.unpriced and "block.0" not in float32.unpriced
    assert float32.float32 == float32.seconds and float32.seconds is not None
    assert eight.float32 is not None and eight.seconds is not None
    left_out = next(share for name, share, _ in float32.slowest if name == "block.0") * float32.seconds
    assert eight.float32 == pytest.approx(float32.seconds - left_out)
    ratio = f"{eight.seconds / eight.float32:.2f} of float32"
    assert ratio in list(step_lines([float32, eight]))[1]


@pytest.mark.parametrize("machine", ["bitfusion", "zc706"])
def test_a_format_without_a_price_has_no_time_and_no_energy(machine: str) -> None:
    convolutions = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.Flatten())
    model = nn.Sequential(convolutions, nn.Linear(256, 4))
    summary = planned(model, "static", machine, format="mx", pins=(Pin("0.0", FULL),))
    float32, eight = summary.steps
    assert float32.seconds is not None and float32.slowest and float32.bounds
    assert (eight.seconds, eight.joules, eight.float32) == (None, None, None)
    assert not eight.bounds and not eight.slowest and "0.2" in eight.unpriced
    assert summary.to_dict()["steps"][1]["seconds"] is None


def test_a_precision_without_a_price_has_no_time() -> None:
    summary = planned(TinyNet(4), "static", "bitfusion", format="mx")
    assert [step.seconds is None for step in summary.steps] == [False, True]
    assert "FW-8/BW-8: - ms, - J, - of float32" in list(step_lines(summary.steps))[1]
    assert "without a price on bitfusion: 8 calls, such as block.0, block.3, relu" in str(summary)


def test_every_accelerator_has_sources_and_plausible_figures() -> None:
    for board in ACCELERATORS:
        assert board.sources and board.watts and 0.5 < board.computes <= 1 and 0.5 < board.streams <= 1
        # narrower types are at least as quick, but for tf32 on boards for games
        assert board.peak["float32"] <= board.peak["bfloat16"] < board.peak["int8"]
    assert [row["name"] for row in machine_rows()] == list(MACHINES)


def test_the_traffic_of_a_model_is_that_of_its_norms_activations_and_sums() -> None:
    summary = planned(TinyNet(4), "float")
    assert {name for step in summary.steps for name in step.unpriced} == set()
    model = fractrain_recording()
    moved = {each.name: each.values for each in traffic_of(model)}
    values = 8 * 8 * 8
    assert moved["block_1"] == 8 * values and moved["block_2"] == 5 * values  # batch norm, ReLU
    assert moved["add"] == 6 * values  # reads two, writes one, and adds up their gradients


def fractrain_recording() -> torch.fx.GraphModule:
    model = rewritten(TinyNet(4), torch.rand(2, 3, 8, 8), method="static")
    recorded: torch.fx.GraphModule = model._state.recording.train
    return recorded


def planned(model: nn.Module, method: str, machine: Machine | str = PLAIN, **changes: Any) -> Summary:
    config = paper(method, **changes)
    return plan(model, config=config, example_inputs=(torch.rand(2, 3, 8, 8),), machine=machine, batch=16)


def test_a_plan_has_a_row_for_floats_and_for_every_option_that_computes() -> None:
    summary = planned(TinyNet(4), "dfq", "h200")
    names = [step.precision for step in summary.steps]
    assert names[:4] == ["float32", "tf32", "bfloat16", "FW-2/BW-6"] and "FW-0/BW-0" not in names
    for step in summary.steps:
        assert sum(step.bounds.values()) == pytest.approx(1) and step.batch == 16
        assert step.seconds is not None and step.joules == pytest.approx(700 * step.seconds)
    printed = str(summary)
    assert "16 samples on h200" in printed and "next wider type" in printed and "upper bound" in printed
    assert "h200, 16 samples, bfloat16" in summary._repr_html_()
    assert "on BitFusion" not in printed and planned(TinyNet(4), "static", "zc706").steps[0].joules is None


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'h200'"):
        find_machine("h20")
    with pytest.raises(ConfigError, match="is not a machine"):
        planned(TinyNet(4), "static", ZC706)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'op' has no choice"):
        PLAIN.step([linear()], {})
    with pytest.raises(ConfigError, match="at least 1 sample"):
        PLAIN.step([], {}, batch=0)
    with pytest.raises(ConfigError, match="format='ints'"):
        PLAIN.supports(EIGHT, "ints")
    with pytest.raises(ConfigError, match="float64"):
        Roofline("bad", "", {"float32": 1, "float64": 1}, 1)


def test_this_processor_is_what_its_probes_measured() -> None:
    assert {"float32", "convolution, float32", "copy"} <= set(probes())
    cpu = cpu_of({"float32": median([0.5, 0.1, 0.2]), "convolution, float32": 0.1, "copy": 0.1})
    assert cpu.peak == pytest.approx({"float32": 2 * 4096 * 256**2 / 0.2})
    assert cpu.convolution == pytest.approx({"float32": 3 * 2 * 16 * 16**2 * 9 * 128**2 / 0.1})
    assert cpu.bandwidth == pytest.approx(8 * (1 << 24) / 0.1) and cpu.watts is None
    assert not cpu.overlaps and cpu.convolution_passes == 3
