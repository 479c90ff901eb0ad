"""Calls through a rewritten model that run the float original, hooks that nothing runs, and checkpointing."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fractrain_fx import FracConfig, FracModel, fractrainify
from fractrain_fx.errors import FracTrainWarning
from tests.capture.circumstances.models import FLOAT, IMAGES, ROWS, Net, gpt2, original_of, resnet, text

PROMPT = text()["input_ids"][:1]
SETTINGS: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False}

CALLS: dict[str, tuple[Callable[[], FracModel], Callable[[Any], Any], str]] = {
    "forward_features": (
        resnet,
        lambda model: model.forward_features(IMAGES),
        r"model\.forward_features\(\.\.\.\) runs",
    ),
    "a container": (resnet, lambda model: model.layer1(torch.zeros(2, 64, 8, 8)), r"model\.layer1\(\.\.\.\) runs"),
    "a layer": (resnet, lambda model: model.fc(torch.zeros(2, 512)), r"model\.fc\(\.\.\.\) runs"),
    "a layer that a method gives": (
        resnet,
        lambda model: model.get_classifier()(torch.zeros(2, 512)),
        r"model\.get_classifier\(\)\(\.\.\.\) runs",
    ),
    "the body": (gpt2, lambda model: model.transformer(PROMPT), r"model\.transformer\(\.\.\.\) runs"),
    "deep inside": (gpt2, lambda model: model.transformer.h[0](torch.zeros(1, 3, 32)), r"model\.transformer\(\.\.\.\)"),
    "generate": (
        gpt2,
        lambda model: model.generate(PROMPT, **SETTINGS),
        r"float GPT2LMHeadModel.*not at trained precision.*call model\(\.\.\.\) on the text so far",
    ),
}


@pytest.mark.parametrize(("make", "call", "words"), CALLS.values(), ids=CALLS)
def test_the_first_call_that_runs_float_layers_warns_at_the_line(
    make: Callable[[], FracModel], call: Callable[[Any], Any], words: str
) -> None:
    model = make().eval()
    with pytest.warns(FracTrainWarning, match=words) as told:
        call(model)
    assert len(told) == 1 and told[0].filename == __file__ and r"restore()" in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(model)


def test_text_at_trained_precision_grows_by_calls_on_the_text_so_far_with_one_recording_for_all_lengths() -> None:
    model, ids = gpt2(FracConfig()), torch.randint(3, 60, (2, 4))
    model(**text())
    model.eval()
    with torch.no_grad():
        for length in range(4, 12):
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
            assert logits.shape[1] == ids.shape[1] == length
            ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert len(list(model._state.variants)) <= 2


def test_ordinary_use_stays_quiet() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model, call in ((resnet(), lambda m: m(IMAGES)), (gpt2(), lambda m: m(**text()))):
            parts = [part for name, part in original_of(model).named_children() if getattr(model, name) is part]
            assert parts
            call(model), call(original_of(model)), call(model.eval())
            copy.deepcopy(model)
        classifier = resnet()
        classifier.get_classifier().weight.requires_grad_(False)
        classifier.group_matcher(), classifier.feature_info
        gpt2().get_input_embeddings()(PROMPT)
        gpt2().get_output_embeddings()


def test_nothing_is_told_of_what_restore_gave_and_nothing_stays_on_it() -> None:
    model = gpt2().eval()
    assert model.transformer.h[0] is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain: Any = model.restore()
        plain.transformer(PROMPT)
        plain.generate(PROMPT, **SETTINGS)
    assert not any(module._forward_pre_hooks for module in plain.modules())


def test_what_was_looked_up_can_be_rewritten_again_copied_and_pickled() -> None:
    model = resnet()
    assert model.layer1 is original_of(model).layer1
    pickle.loads(pickle.dumps(model.layer1))(torch.zeros(2, 64, 8, 8))
    copy.deepcopy(original_of(model))(IMAGES)
    assert fractrainify(original_of(model), config=FLOAT, example_inputs=(IMAGES,)).leaves == {}


def test_hooks_on_modules_that_the_graph_does_not_call_are_told_of_at_the_next_call() -> None:
    model = resnet()
    fired: list[str] = []
    model.layer1.register_forward_hook(lambda *_: fired.append("layer1"))
    model.bn1.register_forward_hook(lambda *_: fired.append("bn1"))
    model.register_forward_hook(lambda *_: fired.append("model"))
    with pytest.warns(FracTrainWarning, match=r"never run: the forward hook .* of 'layer1'\.") as told:
        model(IMAGES)
    assert fired == ["bn1", "model"] and len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(IMAGES)
    model.layer2.register_full_backward_hook(lambda *_: None)
    with pytest.warns(FracTrainWarning, match=r"the backward hook .* of 'layer2'"):
        model.eval()


def test_a_forward_that_is_set_on_a_module_is_told_of() -> None:
    model = resnet()
    original_of(model).layer1.forward = lambda x: x
    with pytest.warns(FracTrainWarning, match="forward that was set on the instance of 'layer1'"):
        model.eval()


def test_a_hook_from_before_keeps_its_module_whole_and_runs() -> None:
    import timm

    plain = timm.create_model("resnet10t", num_classes=10)
    fired: list[str] = []
    plain.get_submodule("layer1").register_forward_hook(lambda *_: fired.append("layer1"))
    model = fractrainify(plain, config=FLOAT, example_inputs=(IMAGES,))
    fired.clear()
    model(IMAGES)
    assert fired == ["layer1"] and "hook" in model.leaves["layer1"]


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_a_hook_from_before_runs_although_it_is_from_the_package_of_its_module(kind: str) -> None:
    plain = Net()
    fired: list[str] = []
    getattr(plain.block, kind)(lambda *_: fired.append("block"))
    model = fractrainify(plain, config=FLOAT, example_inputs=(ROWS,))
    fired.clear()
    model(ROWS).sum().backward()
    assert fired == ["block"] and "hook" in model.leaves["block"]


@pytest.mark.parametrize("kind", ["forward", "full_backward"])
def test_a_hook_from_before_on_the_model_itself_is_told_of(kind: str) -> None:
    plain = Net()
    getattr(plain, f"register_{kind}_hook")(lambda *_: None)
    rows = ROWS.clone().requires_grad_()
    with pytest.warns(FracTrainWarning, match=r"ward hook .*lambda.* of the model itself is not called any more"):
        fractrainify(plain, config=FLOAT, example_inputs=(rows,))


class Migrates(Net):
    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state, prefix, *args)


def test_the_models_own_way_to_load_is_told_of() -> None:
    with pytest.warns(FracTrainWarning, match=r"own _load_from_state_dict is not run by the rewritten model"):
        fractrainify(Migrates(), config=FLOAT, example_inputs=(ROWS,))
    hooked = Net()
    hooked.register_load_state_dict_post_hook(lambda *_: None)
    with pytest.warns(FracTrainWarning, match=r"own _load_state_dict_post_hooks is not run"):
        fractrainify(hooked, config=FLOAT, example_inputs=(ROWS,))


def test_activation_checkpointing_from_before_is_on_again() -> None:
    plain: Any = original_of(gpt2())
    plain.gradient_checkpointing_enable()
    assert fractrainify(plain, config=FLOAT, example_kwargs=text()).is_gradient_checkpointing
