"""The front door: what it does by default, and what it says when something is wrong."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassBase

from fractrain_fx import (
    CostTargets,
    FracConfig,
    FracModel,
    FracTrainError,
    Pin,
    Precision,
    fractrainify,
    plan,
    summarize,
)
from fractrain_fx.errors import (
    ConfigError,
    FracTrainWarning,
    InputError,
    ModelError,
    PassError,
    RuleError,
    RunError,
    TargetError,
)
from fractrain_fx.nn.ranges import RunningRange
from fractrain_fx.passes import OpenAttention, default_passes
from tests.build import rewritten
from tests.models import build


def residual_net(**config: Any) -> FracModel:
    return rewritten(build("tied_weights"), check=True, **config)


def test_a_timm_model_needs_no_example_inputs() -> None:
    import timm

    model = fractrainify(timm.create_model("resnet10t"))
    assert [block.skip for block in model.blocks if block.gated] == [None, None, "identity"] + ["projection"] * 3
    assert model.targets == (2.9, 3.4, 3.6, 3.8)


def test_the_original_is_left_as_it_was_and_shares_its_weights() -> None:
    case = build("tied_weights")
    before = copy.deepcopy(case.model)
    model = fractrainify(case.model, example_inputs=case.args)
    assert [n for n, _ in case.model.named_modules()] == [n for n, _ in before.named_modules()]
    assert model.restore() is case.model
    with torch.no_grad():
        next(iter(model.parameters())).zero_()
    assert not next(iter(case.model.parameters())).any()


def test_attributes_of_the_original_are_reached_through_the_rewritten_model() -> None:
    model = fractrainify(build("tied_weights").model, example_inputs=build("tied_weights").args)
    assert model.embed is model.restore().embed
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = model.nothing_like_it


def test_moving_the_rewritten_model_moves_the_original_with_it() -> None:
    model = residual_net().double()
    assert {p.dtype for p in model.restore().parameters()} == {torch.float64}


def test_no_example_inputs_and_none_to_be_found() -> None:
    with pytest.raises(InputError, match="example_inputs"):
        fractrainify(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


def test_example_inputs_that_the_model_rejects() -> None:
    with pytest.raises(InputError, match=r"rejects|reject"):
        fractrainify(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), example_inputs=(torch.randn(2, 5),))


def test_a_model_without_contractions() -> None:
    with pytest.raises(ModelError, match="no contraction"):
        fractrainify(nn.Sequential(nn.ReLU(), nn.BatchNorm1d(3)), example_inputs=(torch.randn(4, 3),))


def test_a_model_whose_contractions_all_stay_float() -> None:
    two = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    for method, words in (("fractrain", "no block to gate"), ("static", "nothing to quantize")):
        with pytest.raises(ModelError, match=words):
            fractrainify(two, config=FracConfig(method=method), example_inputs=(torch.randn(2, 3),))  # type: ignore[arg-type]


def test_a_rule_that_matches_nothing_offers_near_names() -> None:
    with pytest.raises(RuleError, match=r"mlp\.O.*'mlp\.0'"):
        residual_net(pins=(Pin("mlp.O", Precision(8, 8)),))


def test_a_rule_for_the_first_layer_of_a_model_that_begins_with_an_embedding() -> None:
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 9))
    config = FracConfig(method="static", pins=(Pin("first", Precision(8, 8)),))
    with pytest.raises(RuleError, match=r"'first' \(.*begins with an embedding\) matches none") as caught:
        fractrainify(model, config=config, example_inputs=(torch.randint(9, (4, 5)),))
    assert "mean 'first'" not in str(caught.value)


def test_rules_pin_by_name_kind_and_place_and_the_last_one_wins() -> None:
    pins = (Pin("linear", Precision(8, 16)), Pin("mlp.2", Precision(6, 8)), Pin("last", Precision(8, 8)))
    precision = {op.name: op.precision.precision for op in residual_net(method="pfq", pins=pins).ops}
    assert precision == {"mlp.0": Precision(8, 16), "mlp.2": Precision(6, 8), "head": Precision(8, 8)}


def test_a_target_out_of_reach_prints_what_can_be_reached() -> None:
    with pytest.raises(TargetError, match=r"7 %.*1\.758 to 4\.167 %"):
        residual_net(targets=CostTargets((2.0, 7.0)))


def test_default_targets_move_into_reach_of_options_that_cost_more() -> None:
    model = rewritten(build("sequential"), options=("6/8", "8/8"), weight_bits=6)
    assert model.reachable is not None
    low, high = model.reachable
    assert low == pytest.approx(100 * (6 * 6 + 8 * 6 + 6 * 8) / 3072)
    assert low < model.targets[0] < model.targets[-1] < high


def test_an_unknown_method_offers_near_names() -> None:
    with pytest.raises(ConfigError, match="fractrain"):
        FracConfig(method="fractran")  # type: ignore[arg-type]


def test_an_evaluation_before_training_is_in_ranges_of_the_example_inputs_and_says_once_that_they_are_provisional() -> (
    None
):
    model = residual_net(method="static").eval()
    tokens = torch.randint(0, 32, (2, 6))
    with pytest.warns(FracTrainWarning, match="provisional until a training step or model.calibrate"):
        first = model(tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(model(tokens), first)
    weights = {name: p.clone() for name, p in model.named_parameters()}
    model.calibrate([tokens, (tokens, None)])
    assert model(tokens).shape == (2, 6, 32)
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    with pytest.raises(InputError, match="no batch"):
        model.calibrate([])


def ranges(model: FracModel) -> list[RunningRange]:
    return [each for each in model.modules() if isinstance(each, RunningRange)]


def test_measuring_the_example_inputs_leaves_modes_and_generators_as_they_were() -> None:
    case = build("tied_weights")
    case.model.train()
    part = next(each for each in case.model.modules() if isinstance(each, nn.Linear)).eval()
    before = torch.get_rng_state()
    model = fractrainify(case.model, config=FracConfig(method="static"), example_inputs=case.args)
    assert torch.equal(torch.get_rng_state(), before) and model.training and not part.training
    assert all(float(each.span) > 0 and not each.seen for each in ranges(model))


def test_a_checkpoint_of_the_original_has_its_ranges_measured_anew() -> None:
    model = residual_net(method="static")
    before = [float(each.span) for each in ranges(model)]
    larger = {name: 3 * value for name, value in model.restore().state_dict().items()}
    model.load_state_dict(larger)
    assert not any(bool(each.seen) for each in ranges(model))
    assert [float(each.span) for each in ranges(model)] != before


def test_a_rewritten_model_is_not_rewritten_again() -> None:
    with pytest.raises(ConfigError, match="restore"):
        fractrainify(residual_net())
    tokens = torch.randint(0, 32, (2, 6))
    with pytest.raises(ConfigError, match=r"'0' inside this Sequential was rewritten already.*0\.restore\(\)"):
        fractrainify(nn.Sequential(residual_net(), nn.Linear(32, 2)), example_inputs=(tokens,))
    taken = nn.Sequential()
    taken.add_module("frac", nn.Linear(4, 4))
    with pytest.raises(ConfigError, match="named 'frac'"):
        fractrainify(taken, example_inputs=(torch.rand(2, 4),))


def test_calls_that_do_not_fit_the_recording_are_refused() -> None:
    model = residual_net()
    with pytest.raises(FracTrainError):
        model(torch.zeros(2, 6, dtype=torch.long), torch.zeros(1))
    with pytest.raises(FracTrainError):
        model()


def test_plan_gives_the_table_of_summarize_and_rewrites_nothing() -> None:
    case = build("resnet18")
    keys = set(case.model.state_dict())
    dry = plan(case.model, example_inputs=case.args)
    assert set(case.model.state_dict()) == keys
    wet = summarize(rewritten(case))
    assert (dry.macs, dry.targets, dry.reachable) == (wet.macs, wet.targets, wet.reachable)
    assert [op.precision for op in dry.ops] == [op.precision for op in wet.ops]
    assert "layer1.0" in str(dry) and "first contraction" in str(dry)


def test_a_new_architecture_is_not_loaded_into(tmp_path: Any) -> None:
    residual_net().save_pretrained(tmp_path)
    with pytest.raises(FracTrainError, match="TiedWeights"):
        FracModel.from_pretrained(tmp_path, model=build("sequential").model)
    with pytest.raises(FracTrainError, match="save_pretrained"):
        FracModel.from_pretrained(tmp_path / "nothing", model=build("tied_weights").model)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.one, self.two = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)
        self.embed.requires_grad_(False)
        self.one.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.one(x).relu()
        x = x + self.two(x).relu()
        return self.head(x)


def test_what_is_frozen_costs_no_gradient_and_still_has_its_blocks() -> None:
    model = fractrainify(Frozen(), example_inputs=(torch.randint(0, 8, (2, 3)),))
    one, two, _ = model.ops
    assert [block.skip for block in model.blocks[:2]] == ["identity", "identity"]
    assert one.training_macs == (48, 0, 0)
    assert two.training_macs == (48, 0, 48)


def test_several_gpus_of_one_process_are_refused() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model = fractrainify(net, example_inputs=(torch.randn(2, 4),))
    with pytest.raises(ConfigError, match="start one process a GPU"):
        model._replicate_for_data_parallel()  # what nn.DataParallel calls


def test_a_chain_of_its_own_is_asked_for_when_a_saved_model_is_loaded(tmp_path: Any) -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))

    config, x = FracConfig(method="static"), torch.randn(2, 4)
    chain = [each for each in default_passes(config) if not isinstance(each, OpenAttention)]
    fractrainify(net(), config=config, example_inputs=(x,), passes=chain).save_pretrained(tmp_path)
    with pytest.raises(RunError, match=r"another chain \(Shapes, Macs"):
        FracModel.from_pretrained(tmp_path, model=net())
    again = FracModel.from_pretrained(tmp_path, model=net(), passes=chain)
    again.save_pretrained(tmp_path / "again")
    with pytest.raises(RunError, match="another chain"):
        FracModel.from_pretrained(tmp_path / "again", model=net(), passes=default_passes(config))


def test_the_package_imports_no_compiler_and_no_library_of_models() -> None:
    """Each of them takes longer to import than the package does."""
    script = (
        "import sys, fractrain_fx\n"
        "heavy = {'accelerate', 'pandas', 'sympy', 'timm', 'torch._dynamo', 'torchvision', 'transformers'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.long
def test_a_model_compiles_whole_where_recording_imported_the_compiler() -> None:
    script = (
        "import sys, torch\n"
        "from fractrain_fx import fractrainify\n"
        "from tests.training.tiny import Plain\n"
        "x = torch.rand(2, 3, 8, 8)\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "model = fractrainify(Plain(), example_inputs=(x,), check=False).train()\n"
        "torch.compile(model, fullgraph=True, backend='aot_eager')(x).sum().backward()\n"
    )
    subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)


def test_what_goes_wrong_inside_a_pass_names_the_pass_and_keeps_the_cause() -> None:
    class Lost(PassBase):
        def call(self, graph_module: GraphModule) -> None:
            raise IndexError("index out of range in self")

    case = build("tied_weights")
    with pytest.raises(PassError, match=r"'Lost' pass.*IndexError: index out of range in self.*example inputs") as told:
        fractrainify(case.model, example_inputs=case.args, passes=[Lost()])
    assert isinstance(told.value.__cause__, IndexError)


def test_printing_shows_the_model_and_counts_what_was_inserted() -> None:
    original = timm.create_model("resnet10t", num_classes=10)
    before = str(original)
    model = fractrainify(original, example_inputs=(torch.randn(2, 3, 32, 32),))
    text = str(model)
    assert len(text) < 1.5 * len(before)
    assert "method=fractrain, ops=15, blocks=8" in text and "(global_pool): SelectAdaptivePool2d" in text
    (inserted,) = (line for line in text.splitlines() if line.startswith("  (frac): "))
    assert "1 Controller" in inserted and "13 WeightQuantizer" in inserted
