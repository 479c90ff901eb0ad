"""Models of half types, and rewritten models that are cast."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import FracModel
from fractrain_fx.nn.cost import gated_meter
from fractrain_fx.nn.ranges import RunningRange
from tests import build
from tests.choices import choose

ROWS = torch.linspace(-1, 1, 32).reshape(4, 8)


class ReadsTypes(nn.Module):
    """Casts to the types of weights and inputs, and to one that is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x.to(self.up.weight.dtype))
        h = (h * h.to(torch.float32).square().mean(-1, keepdim=True).rsqrt()).to(x.dtype)
        barred = torch.zeros(8, dtype=h.dtype).masked_fill(torch.arange(8) > 5, torch.finfo(h.dtype).min)
        h = torch.softmax(h + barred, dim=-1, dtype=torch.float32).to(h.dtype)
        return x + self.down(h)


def rewritten(model: nn.Module, x: Tensor, method: str = "float") -> FracModel:
    return build.rewritten(model, x, config=build.paper(method))


def test_a_cast_model_computes_as_the_cast_original_and_back(caplog: pytest.LogCaptureFixture) -> None:
    plain = ReadsTypes()
    half = copy.deepcopy(plain).bfloat16()
    model = rewritten(plain, ROWS)
    expected = model(ROWS)
    model.to(torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        found = model(ROWS.bfloat16())
    assert "parameters of type float32" in caplog.text
    assert found.dtype == torch.bfloat16 and torch.equal(found, half(ROWS.bfloat16()))
    assert torch.equal(copy.deepcopy(model)(ROWS.bfloat16()), found)

    again = model.float()(ROWS)
    assert torch.equal(again, model.restore()(ROWS)) and again.dtype == expected.dtype


def test_a_model_of_half_type_is_recorded_as_it_is() -> None:
    half = ReadsTypes().bfloat16()
    expected = half(ROWS.bfloat16())
    assert torch.equal(rewritten(half, ROWS.bfloat16())(ROWS.bfloat16()), expected)


def test_a_cast_model_trains_at_the_same_cost_with_ranges_and_tables_in_float32() -> None:
    model = rewritten(ReadsTypes(), ROWS, "dfq").train()
    choose(model, [0, 1, 2, 3])
    model(ROWS)
    full = model.cost.cp.item()
    model.to(torch.bfloat16)
    output = model(ROWS.bfloat16())
    (output.float().square().sum() + model.cost.cp).backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.bfloat16}
    assert model.cost.cp.item() == pytest.approx(full, rel=1e-6)
    meter = gated_meter(model)
    ranges = [each for each in model.modules() if isinstance(each, RunningRange)]
    assert meter is not None and ranges
    numbers = [b for each in (meter, *ranges) for b in each.buffers() if b.is_floating_point()]
    assert {b.dtype for b in numbers} == {torch.float32}
    assert model.eval()(ROWS.bfloat16()).dtype == torch.bfloat16


def test_models_whose_code_reads_no_types_are_not_recorded_again(caplog: pytest.LogCaptureFixture) -> None:
    model = rewritten(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), ROWS).to(torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        assert model(ROWS.bfloat16()).dtype == torch.bfloat16
    assert "recorded again" not in caplog.text


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


@pytest.mark.parametrize("build_model", [ReadsTypes, layers])
@pytest.mark.parametrize("training", [True, False])
def test_a_cast_model_takes_a_checkpoint_of_the_original(build_model: Callable[[], nn.Module], training: bool) -> None:
    original = build_model()
    checkpoint = copy.deepcopy(original.state_dict())
    model = rewritten(original, ROWS, "static").train(training)
    model.bfloat16()
    modes = {name: module.training for name, module in model.named_modules()}
    model.load_state_dict(checkpoint)
    assert {name: module.training for name, module in model.named_modules() if name in modes} == modes
    with pytest.warns(UserWarning, match="evaluated before it was trained"):
        output = model.eval()(ROWS.bfloat16())
    assert output.dtype == torch.bfloat16
    again = rewritten(original.bfloat16(), ROWS.bfloat16(), "static").eval()
    assert torch.equal(output, again(ROWS.bfloat16()))


def test_a_cast_model_is_deployed_and_compared_on_its_example_inputs() -> None:
    model = rewritten(layers(), ROWS, "static").bfloat16()
    model.calibrate([ROWS.bfloat16()])
    plain: Any = model.deployed()
    assert plain.difference == 0 and plain(ROWS.bfloat16()).dtype == torch.bfloat16


def test_parts_keep_their_modes_when_the_example_inputs_cannot_run() -> None:
    model = rewritten(layers(), ROWS, "static").train()
    modes = {name: module.training for name, module in model.named_modules()}
    for parameter in model.get_submodule("2").parameters():  # in two types, which no input fits
        parameter.data = parameter.data.bfloat16()
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        model.load_state_dict(model.restore().state_dict())
    assert {name: module.training for name, module in model.named_modules()} == modes
