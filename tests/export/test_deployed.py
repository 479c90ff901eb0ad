"""The plain module that leaves training: same numbers as evaluation, the original's class, nothing that trains."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from fractrain_fx import FracConfig, Pin, Precision, fractrainify
from fractrain_fx.config import RunConfig
from fractrain_fx.errors import CalibrationError, ExportError
from fractrain_fx.nn.quantizers import ActivationQuantizer, WeightQuantizer
from fractrain_fx.zoo.models import resnet20
from tests.build import rewritten as build_rewritten
from tests.deployable import HEADS, SIZES, Convolutions, bert, difference, gpt2, llama, rewritten, vit
from tests.models import thinned

BLOCKS: list[dict[str, Any]] = [
    {},
    {"format": "fp8"},
    {"format": "mx"},
    {"format": "nvfp4", "precision": Precision(4, 4)},
    {"pins": [Pin("linear", Precision(4, 4))]},
]


@pytest.mark.parametrize("settings", thinned(BLOCKS, 2), ids=["affine", "fp8", "mx", "nvfp4", "mixed"])
@pytest.mark.parametrize("build", [vit, llama, bert, gpt2])
def test_it_is_the_originals_class_and_equals_evaluation_bit_for_bit(build: Any, settings: dict[str, Any]) -> None:
    if build is gpt2 and "pins" in settings:
        settings = {"pins": [Pin("addmm", Precision(4, 4))]}
    model = rewritten(build(), **settings)
    plain = model.deployed()
    recording = model._state.recording
    assert type(plain) is type(model._state.original)
    assert plain.float_products == () and plain.difference == 0
    with torch.no_grad():
        assert difference(model(*recording.args, **recording.kwargs), plain(*recording.args, **recording.kwargs)) == 0
    assert not any(isinstance(each, ActivationQuantizer | WeightQuantizer) for each in plain.modules())
    assert not any(p.requires_grad for p in plain.parameters())
    assert dict(model._state.original.state_dict()).keys() <= plain.state_dict().keys()


def test_a_model_that_multiplies_activations_itself_becomes_its_evaluation_graph() -> None:
    model = rewritten(Convolutions(), torch.randn(2, 3, 8, 8))
    plain = model.deployed()
    x = torch.randn(5, 3, 8, 8)
    assert plain.float_products == ()
    with torch.no_grad():  # on some processors the model's convolution adds up in another order
        torch.testing.assert_close(plain(x), model(x), rtol=1e-5, atol=1e-5)


def test_a_transform_of_the_forward_product_is_not_left_out_silently() -> None:
    model = rewritten(Convolutions(), torch.randn(2, 3, 8, 8), format="int", recipe="halo")
    with pytest.raises(ExportError, match=r"after a Hadamard transform.*a recipe without hadamard in the forward"):
        model.deployed()


def test_a_copy_and_a_pickled_one_compute_the_same() -> None:
    plain = rewritten(vit()).deployed()
    x = torch.randn(3, 3, 32, 32)
    again = pickle.loads(pickle.dumps(plain))
    with torch.no_grad():
        assert torch.equal(plain(x), copy.deepcopy(plain)(x)) and torch.equal(plain(x), again(x))


def test_generation_with_a_cache_gives_the_tokens_of_a_loop_over_evaluation() -> None:
    model = rewritten(llama())
    plain: Any = model.deployed()
    ids = torch.randint(0, 32, (1, 4))
    with torch.no_grad():
        found = plain.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
        for _ in range(6):
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
            ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], 1)
    assert found.tolist() == ids.tolist()


def test_a_stage_can_be_named_by_number_or_precision_and_the_model_keeps_its_own() -> None:
    model = rewritten(vit(), method="pfq")
    first, last, four = model.deployed(0), model.deployed(-1), model.deployed("4/6")
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model(x), first(x))
        model.set_precision("8/8")
        assert torch.equal(model(x), last(x))
        model.set_precision("4/6")
        assert torch.equal(model(x), four(x))
    assert first.difference == last.difference == four.difference == 0


def test_integer_levels_hold_zero_and_lie_near_those_of_evaluation() -> None:
    model = rewritten(vit())
    plain: Any = model.deployed(levels="integer")
    assert 0 < plain.difference < 0.1
    roundings = [each for each in plain.modules() if hasattr(each, "has_range")]
    assert roundings and all(float(each(torch.zeros(1))) == 0 for each in roundings)


def test_ranges_that_were_never_seen_are_refused() -> None:
    model = fractrainify(vit(), config=FracConfig(method="static"))
    with pytest.raises(CalibrationError, match="calibrate"):
        model.deployed()


def test_wrong_settings_are_refused_with_the_way_out() -> None:
    model = rewritten(vit())
    for settings, words in (
        ({"levels": "whole"}, "write 'exact'"),
        ({"stage": 7}, "stages are 0 to 0"),
        ({"choices": "commonest"}, "leave it out"),
    ):
        with pytest.raises(ExportError, match=words):
            model.deployed(**settings)


class TestGates:
    @pytest.fixture(scope="class")
    @staticmethod
    def gated() -> Any:
        torch.manual_seed(0)
        config = FracConfig.paper("dfq", run=RunConfig(backend="plain"))
        model = build_rewritten(resnet20(), torch.randn(2, 3, 32, 32), config=config)
        with torch.no_grad():
            model(torch.randn(4, 3, 32, 32))
        return model.eval()

    def test_they_are_refused_without_a_choice(self, gated: Any) -> None:
        with pytest.raises(ExportError, match="commonest"):
            gated.deployed()

    def test_a_stage_takes_their_place(self, gated: Any) -> None:
        plain = gated.deployed("8/8")
        assert isinstance(plain, type(gated._state.original))
        with torch.no_grad():
            assert plain(torch.randn(2, 3, 32, 32)).isfinite().all()

    def test_the_commonest_options_come_with_their_cost(self, gated: Any) -> None:
        batches = [(torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,))) for _ in range(2)]
        plain = gated.deployed(choices="commonest", batches=batches)
        cost = plain.fixed_choices
        assert cost.samples == 8 and cost.measure == "accuracy" and 0 <= cost.fixed <= 100
        assert set(cost.options) == {block.name for block in gated.blocks if block.gated}

    def test_samples_that_all_choose_the_same_get_what_evaluation_gives_them(self, gated: Any) -> None:
        x = torch.randn(1, 3, 32, 32)
        with torch.no_grad():
            expected = gated(x)
            options = {block: int(choice[0].argmax()) for block, choice in gated.cost.choice.items()}
            assert difference(expected, gated.deployed(choices=options)(x)) < 1e-5

    def test_a_block_that_every_sample_skips_is_left_out(self, gated: Any) -> None:
        skipped = {block.name: 0 for block in gated.blocks if block.gated}
        plain = gated.deployed(choices=skipped)
        convolutions = [node for node in plain.graph.graph.nodes if "conv" in str(node.target)]
        assert len(convolutions) < sum(isinstance(each, nn.Conv2d) for each in gated._state.original.modules())
        with torch.no_grad():
            assert plain(torch.randn(2, 3, 32, 32)).isfinite().all()

    def test_batches_without_labels_are_refused(self, gated: Any) -> None:
        with pytest.raises(ExportError, match="labels"):
            gated.deployed(choices="commonest", batches=[torch.randn(2, 3, 32, 32)])


def test_parts_that_were_frozen_in_evaluation_mode_stay_so_in_a_model_that_trains() -> None:
    model = rewritten(Convolutions(), torch.randn(2, 3, 8, 8)).train()
    norm = next(each for each in model.modules() if isinstance(each, nn.BatchNorm2d)).eval()
    model.deployed()
    assert model.training and not norm.training and next(model.children()).training


def test_products_that_a_model_of_transformers_keeps_float_are_named() -> None:
    config = transformers.MixtralConfig(**SIZES, **HEADS, num_key_value_heads=1, num_local_experts=2)
    model = rewritten(transformers.MixtralForCausalLM(config))
    plain: Any = model.deployed()
    place = "model.layers.0.mlp"
    assert plain.float_products == (f"{place}.gate", f"{place}.experts.gate_up_proj", f"{place}.experts.down_proj")
    assert plain.difference > 0 and type(plain) is transformers.MixtralForCausalLM
