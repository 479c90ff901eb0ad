"""A rule may give an op a precision for each stage: data that the stage changes, counted, saved and deployed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from fractrain_fx import Engine, FracConfig, FracModel, Pin, Precision, RunConfig, fractrainify, summarize
from fractrain_fx.errors import ConfigError
from fractrain_fx.hardware.run_cost import StepPrices, run_cost
from tests.build import rewritten as build_rewritten

X = torch.randn(16, 8)
STAGES = "FW(3,4,8)/BW(4,6,8)"
OWN = {"2": ("FW-3/BW-4", "FW-6/BW-4", "FW-8/BW-8"), "4": ("FW-4/BW-6",) * 3}
PINS = ("2=FW(3,6,8)/BW(4,4,8)", "4=FW(4,4,4)/BW(6,6,6)", "8=FW-6/BW-6")


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(5) for layer in (nn.Linear(8, 8), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(8, 4))


def rewritten(pins: tuple[str, ...] = PINS, **settings: object) -> FracModel:
    staged = {} if settings.get("method") == "static" else {"stages": STAGES, "schedule": "manual"}
    config = FracConfig.from_dict({"method": "pfq", "format": "affine", "pins": list(pins), **staged, **settings})
    return build_rewritten(network(), X, config=config).train()


def bits(model: FracModel) -> dict[str, str]:
    return {op.name: str(op.precision) for op in model.ops}


def step(model: nn.Module) -> Tensor:
    torch.manual_seed(1)
    model.zero_grad()
    output: Tensor = model(X)
    output.square().mean().backward()
    return output.detach()


def test_each_op_has_its_widths_in_each_stage_and_computes_like_a_model_pinned_to_them() -> None:
    model = rewritten()
    engine = Engine(model, epochs=3)
    for stage, rest in enumerate(("FW-3/BW-4", "FW-4/BW-6", "FW-8/BW-8")):
        assert bits(model) | {name: own[stage] for name, own in OWN.items()} == bits(model)
        assert (bits(model)["6"], bits(model)["8"]) == (rest, "FW-6/BW-6 (pinned)")
        pins = [f"{name}={own[stage]}" for name, own in OWN.items()]
        same = rewritten((*pins, PINS[-1]), method="static", precision=rest)
        held = {key: each for key, each in model.frac.state_dict().items() if key.startswith(("quant.", "noise."))}
        same.frac.load_state_dict(held, strict=False)
        output = step(model)
        assert torch.equal(step(same), output)
        for (name, ours), theirs in zip(model.named_parameters(), same.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None and torch.equal(ours.grad, theirs.grad), name
        assert float(model.cost.cp_total) == pytest.approx(float(same.cost.cp_total), rel=1e-6)
        engine.loss(output.mean())
        engine.end_epoch()
    assert [row.level for row in engine.ledger.rows] == ["FW-3/BW-4", "FW-4/BW-6", "FW-8/BW-8"]
    assert engine.ledger.rows[0].cp < engine.ledger.rows[1].cp < engine.ledger.rows[2].cp
    total = run_cost(StepPrices(model, len(X)), engine.ledger.rows).total
    full = sum(sum(op.training_macs) for op in model.ops) * engine.ledger.samples
    assert total.macs / full == pytest.approx(engine.ledger.mean_cp_total, rel=1e-5), "at each stage's widths"


@pytest.mark.long
def test_a_stage_change_compiles_nothing() -> None:
    model = rewritten()
    counter = CompileCounterWithBackend("aot_eager")
    compiled: Any = torch.compile(model, fullgraph=True, backend=counter)
    outputs = []
    for stage in ("3/4", "4/6", "8/8"):
        model.set_precision(stage)
        outputs.append(step(compiled))
    assert counter.frame_count == 1
    assert not torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[1], outputs[2])


def test_the_stage_is_in_the_checkpoint_and_the_rules_in_the_recipe(tmp_path: Path) -> None:
    model = rewritten()
    step(model)
    model.set_precision("4/6")
    first = step(model)
    model.save_pretrained(tmp_path)
    loaded = FracModel.from_pretrained(tmp_path, model=network()).train()
    other = rewritten()
    other.load_state_dict(model.state_dict())
    for each in (loaded, other):
        assert bits(each) == bits(model) and each.stage == model.stage
        assert torch.equal(step(each), first)
        assert float(each.cost.cp_total) == float(model.cost.cp_total)
    assert loaded.frac_config == model.frac_config


def test_frozen_parts_lower_the_cost_at_the_present_stage() -> None:
    model = rewritten()
    model.set_precision("4/6")
    model.get_parameter("2.weight").requires_grad_(False)
    step(model)
    fresh = rewritten()
    fresh.get_parameter("2.weight").requires_grad_(False)
    fresh.set_precision("4/6")
    step(fresh)
    assert float(model.cost.cp_total) == float(fresh.cost.cp_total)


class OptionallyScaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        out: Tensor = self.layers(x)
        return out if scale is None else out * scale


@pytest.mark.parametrize("gradient_bits", ["given", "needed"])
def test_a_recording_that_is_made_in_a_later_stage_costs_what_the_first_one_does(gradient_bits: str) -> None:
    settings = {
        "method": "pfq",
        "stages": "FW(4,8)/BW(8,8)",
        "schedule": "manual",
        "pins": ["layers.1=FW(4,8)/BW(8,8)"],
    }
    config = FracConfig.from_dict({**settings, "affine": {"gradient_bits": gradient_bits}})
    model = build_rewritten(OptionallyScaled(), X, config=config).train()
    for stage, cp in (("8/8", 0.0625), ("4/8", (4 * 4 + 4 * 8 + 4 * 8) / 3 / 1024)):
        model.set_precision(stage)
        for scale in ({}, {"scale": torch.tensor(2.0)}):
            model(X, **scale)
            assert model.cost is not None and float(model.cost.cp) == pytest.approx(cp)


def test_a_stage_is_deployed_at_the_widths_that_it_has() -> None:
    model = rewritten()
    step(model)
    wide, narrow = (model.deployed(stage=stage)(X) for stage in (-1, 0))
    model.eval()
    model.set_precision("3/4")
    torch.testing.assert_close(narrow, model(X))
    assert not torch.equal(wide, narrow)
    with pytest.raises(ConfigError, match="is not a stage"):
        model.deployed(stage="6/8")


def test_the_table_shows_the_widths_of_all_stages() -> None:
    found = summarize(rewritten(), ops=True)
    assert "scheduled FW(3,6,8)/BW(4,4,8): rule '2'" in str(found)
    listed = {op["name"]: op["precision"]["bits"] for op in found.to_dict()["ops"]}
    assert listed["2"] == "FW(3,6,8)/BW(4,4,8)" and listed["8"] == "FW-6/BW-6"


def test_a_precision_that_is_not_a_stage_is_refused() -> None:
    model = rewritten()
    with pytest.raises(
        ConfigError, match="FW-6/BW-8 is not a stage of FW\\(3,4,8\\)/BW\\(4,6,8\\), and the rule for '2'"
    ):
        model.set_precision("6/8")


def test_codes_are_not_kept_of_a_weight_whose_width_changes() -> None:
    pins = ("2=FW(3,6,8)/BW(4,4,8)", "4=FW(4,4,4)/BW(6,6,6)")
    model = rewritten(pins, stages="FW(8,8,8)/BW(4,6,8)")
    step(model)
    for name in ("2.weight", "4.weight", "6.weight"):
        model.get_parameter(name).requires_grad_(False)
    packed = model.pack_frozen()
    assert packed.bits == {"4.weight": 4, "6.weight": 8}
    assert packed.left["2.weight"] == "rounded to other bits in other stages, and codes have one width"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": "static"}, "only method 'pfq' has stages of precision"),
        ({"stages": "FW(3,8)/BW(6,8)"}, "has 3 precisions, and FW\\(3,8\\)/BW\\(6,8\\) has 2 stages"),
        ({"stages": "FW(3,8,8)/BW(6,8,8)"}, "has one twice"),
        ({"schedule": "cyclic"}, "trains between the stages"),
    ],
)
def test_rules_and_stages_that_do_not_fit_are_named(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rewritten(**settings)  # type: ignore[arg-type]


def test_torchao_computes_the_ops_whose_own_widths_it_has() -> None:
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.ReLU())), nn.Linear(32, 4))
    config = FracConfig(
        method="pfq",
        format="mx",
        recipe="mxfp8",
        stages="FW(6,8)/BW(8,8)",
        pins=(Pin("2", "FW(8,8)/BW(8,8)"),),
        run=RunConfig(torchao=True),
    )
    x = torch.randn(32, 32)
    model = fractrainify(net, config=config, example_inputs=(x,), check=False).train()
    backends = []
    for stage in ("6/8", "8/8"):
        model.set_precision(stage)
        model(x).sum().backward()
        backends.append({name: each.backend for name, each in model.backends().items()})
    assert [each["2"] for each in backends] == ["torchao", "torchao"]
    assert [each["4"] for each in backends] == ["plain", "torchao"]


def test_a_rule_reads_and_prints_its_stages() -> None:
    pin = Pin("2", "FW(3,6)/BW(4,4)")
    assert pin.stages == (Precision(3, 4), Precision(6, 4)) and Pin.parse(str(pin)) == pin
