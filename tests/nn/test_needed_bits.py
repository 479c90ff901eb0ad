"""Each sample's gradient takes the bits that its levels need: the numbers stay, and the cost falls by what is saved."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fractrain_fx import AffineConfig, Engine, FracConfig, FracModel, Pin, RunConfig
from fractrain_fx.errors import ConfigError
from fractrain_fx.formats import get_format
from fractrain_fx.formats.affine import AffineFormat
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.nn.needed_bits import MeasuringGradientQuantizer
from tests.build import rewritten

NEEDED = AffineConfig(gradient_bits="needed")


@given(st.integers(2, 10), st.lists(st.floats(-12, 0), min_size=2, max_size=6), st.sampled_from(["range", "zero"]))
def test_they_number_all_levels_that_rounding_can_reach_and_one_bit_less_does_not(
    bits: int, exponents: list[float], grid: Any
) -> None:
    torch.manual_seed(0)
    fmt, width = AffineFormat(AffineConfig(gradient_grid=grid)), torch.tensor(bits)
    g = torch.randn(len(exponents), 40) * torch.tensor(exponents).exp2().unsqueeze(1)
    needed = fmt.needed_bits(g, width, BatchAxis())
    lo, span, _ = fmt.gradient_range(g, width, None)
    place = (g.double() - lo.double()) / (span.double() / (2**bits - 1))
    levels = place.amax(1).ceil() - place.amin(1).floor() + 1
    for count, found in zip(levels.tolist(), needed.tolist(), strict=True):
        assert 1 <= found <= bits
        # A value on a level may count as one on either side of it.
        assert 2**found >= min(count - 2, 2**bits) and (found == 1 or 2 ** (found - 1) < count + 2)
    for seed in range(5):
        rounded = fmt.gradient(g, width, axis=BatchAxis(), seed=torch.tensor(seed))
        codes = ((rounded.double() - lo.double()) / (span.double() / (2**bits - 1))).round()
        reached = codes.amax(1) - codes.amin(1) + 1
        assert all(count <= 2**found + 2 for count, found in zip(reached.tolist(), needed.tolist(), strict=True))


def test_folded_samples_none_and_formats_without_levels() -> None:
    g = torch.cat([torch.randn(4, 3), 1e-3 * torch.randn(4, 3)])  # two samples of four rows
    needed = AffineFormat().needed_bits(g, torch.tensor(8), BatchAxis(factor=4))
    assert needed[0] == 8 and needed[1] < 4
    assert AffineFormat().needed_bits(g[:0], torch.tensor(8), BatchAxis()).tolist() == [8]
    assert get_format("dorefa").needed_bits(g, torch.tensor(8), BatchAxis()).tolist() == [8]


def test_a_gradient_that_is_not_finite_or_the_same_everywhere_saves_nothing_that_is_not_there() -> None:
    quantizer = MeasuringGradientQuantizer(AffineFormat())
    for value, share in ((math.nan, 1.0), (math.inf, 1.0), (2.0, 1 / 8)):
        quantizer.measure(torch.full((3, 4), value), torch.tensor(8))
        assert quantizer.share == share


class Net(nn.Module):
    """Four layers, of which the last two give some samples gradients that are much smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def trained(steps: int = 3, fused: bool = True, **fields: Any) -> tuple[FracModel, list[float]]:
    torch.manual_seed(0)
    x, weight = torch.randn(16, 8), torch.logspace(0, -3, 16).unsqueeze(1)
    run = RunConfig(backend=fields.pop("backend", "plain"))
    model = rewritten(Net(), x, config=FracConfig(**{"method": "static", "run": run, **fields}))
    engine, call = Engine(model, epochs=10), model if fused else model.graph_module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        torch.manual_seed(5)
        out = call(x)
        loss = (weight * (out[0] if isinstance(out, tuple) else out).square()).mean()
        (engine.loss(loss) if fused else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize("backend", ["plain", "cpu"])
@pytest.mark.parametrize("fields", [{}, {"method": "pfq"}, {"pins": (Pin("last", "FW-8/BW-8"),)}], ids=str)
def test_training_is_the_same_bit_for_bit_and_its_backward_products_cost_less(
    backend: str, fields: dict[str, Any]
) -> None:
    full, losses = trained(backend=backend, **fields)
    model, same = trained(backend=backend, affine=NEEDED, **fields)
    assert losses == same
    assert model.cost.fw == full.cost.fw
    assert model.cost.cp_total < full.cost.cp_total
    for path in ("eb", "gc", "cp"):
        assert 0.3 < float(getattr(model.cost, path) / getattr(full.cost, path)) < 0.95


def test_the_cost_is_that_of_the_shares_of_the_step_before() -> None:
    pins = (Pin("layers.1", "FW-4/BW-6"),)
    model, _ = trained(1, pins=pins, affine=NEEDED)
    first = model.cost
    nominal = trained(1, pins=pins)[0].cost
    assert first.cp_total == nominal.cp_total  # nothing was measured before the first step
    shares = {name.split(".")[2]: float(x) for name, x in model.state_dict().items() if name.endswith("gradient.share")}
    assert len(shares) == 2 and all(0 < share < 1 for share in shares.values())
    model(torch.randn(16, 8))
    macs = 64
    bits = {"layers_1": (4, 6), "layers_2": (8, 8)}
    spent = sum(macs * fw * (fw + 2 * bw * shares[name]) for name, (fw, bw) in bits.items()) / 1024
    floats = macs * (2 + 3)  # the first layer's input has no gradient
    assert float(model.cost.cp_total) == pytest.approx((spent + floats) / (macs * 11), rel=1e-5)


def test_pins_with_a_precision_for_each_stage_follow_it() -> None:
    pins = (Pin("layers.1", "FW(3,6)/BW(4,8)"),)
    fields: dict[str, Any] = {"method": "pfq", "stages": "FW(4,8)/BW(6,8)", "pins": pins}
    model, full = trained(1, affine=NEEDED, **fields)[0], trained(1, **fields)[0]
    shares = [float(x) for name, x in model.state_dict().items() if name.endswith("gradient.share")]
    for stage in model.frac_config.precision_stages:
        for each in (model, full):
            each.set_precision(stage)
            each(torch.randn(16, 8))
        saved = float(full.cost.eb - model.cost.eb)
        own = model.frac_config.pins[0].stages[model.frac_config.precision_stages.index(stage)]
        parts = [(1 - share) * at.fw * at.bw / 2048 for share, at in zip(shares, (own, stage), strict=True)]
        assert saved == pytest.approx(sum(parts), rel=1e-4)


def test_the_graph_shown_measures_too_and_copies_and_checkpoints_keep_it() -> None:
    model, _ = trained(1, affine=NEEDED)
    shown, _ = trained(1, fused=False, affine=NEEDED)
    names = [name for name in model.state_dict() if name.endswith("gradient.share")]
    for name in names:
        torch.testing.assert_close(shown.state_dict()[name], model.state_dict()[name])
    other = copy.deepcopy(model)
    fresh, _ = trained(0, affine=NEEDED)
    fresh.load_state_dict(model.state_dict())
    for each in (other, fresh):
        assert all(torch.equal(each.state_dict()[name], model.state_dict()[name]) for name in names)
    x = torch.randn(16, 8)
    other(x), model(x)
    assert other.cost.cp == model.cost.cp < 1


def test_what_cannot_measure_is_refused() -> None:
    by_sample = AffineConfig(gradient_bits="needed", ranges="sample")
    for method, affine, reason in (
        ("dfq", NEEDED, "gates choose the backward bits of method 'dfq'"),
        ("slu", NEEDED, "method 'slu' has no bits of gradients"),
        ("float", NEEDED, "method 'float' has no bits of gradients"),
        ("static", by_sample, "affine.ranges='sample' gives samples ranges of their own"),
    ):
        with pytest.raises(ConfigError, match=rf"is for methods 'static' and 'pfq' .*, and {re.escape(reason)}"):
            FracConfig(method=method, affine=affine)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="for format"):
        FracConfig(method="static", format="mx", affine=NEEDED)


@pytest.mark.long
def test_a_compiled_graph_measures_in_its_backward_pass() -> None:
    eager, _ = trained(0, affine=NEEDED)
    compiled = copy.deepcopy(eager)
    x, weight = torch.randn(16, 8), torch.logspace(0, -3, 16).unsqueeze(1)
    for model, call in ((eager, eager), (compiled, torch.compile(compiled, backend="aot_eager", fullgraph=True))):
        (weight * call(x).square()).mean().backward()
        call(x)
        assert 0.3 < model.cost.cp / (64 / 1024) < 0.9
    shares = [[x for name, x in each.state_dict().items() if name.endswith("share")] for each in (eager, compiled)]
    torch.testing.assert_close(shares[1], shares[0], rtol=0.05, atol=0)  # the noise is another
