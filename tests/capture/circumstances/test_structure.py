"""Modules and parameters of the original that are replaced after it was rewritten."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fractrain_fx import Engine, FracConfig, FracModel, fractrainify
from fractrain_fx.errors import FracTrainWarning, ModelError
from tests.capture.circumstances.models import FLOAT, IMAGES, ROWS, gpt2, net, original_of, resnet, text
from tests.models import thinned


def adapters(original: Any) -> None:
    lora = peft.LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    peft.get_peft_model(original, lora)


def untie(original: Any) -> None:
    original.lm_head.weight = nn.Parameter(original.lm_head.weight.detach().clone())


OF_RESNET: dict[str, tuple[Callable[[Any], Any], str]] = {
    "reset_classifier": (lambda model: model.reset_classifier(4), r"'fc' was Linear\(.*=10.*=4"),
    "another head": (lambda model: setattr(model, "fc", nn.Linear(512, 4)), r"'fc' was Linear"),
    "a layer within": (
        lambda model: setattr(model.layer1[0], "conv1", nn.Conv2d(64, 64, 1)),
        r"'layer1\.0\.conv1' was",
    ),
    "a layer more": (lambda model: model.layer1.append(nn.Identity()), r"'layer1\.1' was added"),
    "a layer less": (lambda model: delattr(model.layer2[0], "downsample"), r"'layer2\.0\.downsample' .*gone"),
    "pruning": (
        lambda model: torch.nn.utils.prune.l1_unstructured(model.fc, "weight", 0.5),
        r"'fc\.weight' is gone; pruning",
    ),
    "parametrization": (lambda model: torch.nn.utils.parametrizations.weight_norm(model.fc), r"'fc\.parametrizations'"),
}
OF_GPT2: dict[str, tuple[Callable[[Any], Any], str]] = {
    "resize_token_embeddings": (
        lambda model: model.resize_token_embeddings(70, mean_resizing=False),
        r"'transformer\.wte\.weight' had shape \(64, 32\) and has \(70, 32\)",
    ),
    "set_input_embeddings": (lambda model: model.set_input_embeddings(nn.Embedding(64, 32)), r"'transformer\.wte' was"),
    "untied": (untie, r"between 'lm_head\.weight', 'transformer\.wte\.weight' have changed"),
    "adapters": (adapters, r"'transformer\.h\.0\.attn\.c_attn' was Conv1D"),
}
CHANGES = [(resnet, *each) for each in OF_RESNET.values()] + [(gpt2, *each) for each in OF_GPT2.values()]


@pytest.mark.parametrize(("make", "change", "words"), thinned(CHANGES, 3), ids=[*OF_RESNET, *OF_GPT2])
def test_a_change_of_structure_is_an_error_that_names_it_and_the_way_out(
    make: Callable[[], FracModel], change: Callable[[Any], Any], words: str, tmp_path: Path
) -> None:
    model = make()
    change(original_of(model))
    for look in (model.restore, model.eval, model.look_for_changes, lambda: model.save_pretrained(tmp_path)):
        with pytest.raises(ModelError, match=words) as told:
            look()
        assert "fractrainify(model.restore(structure_changed=True), ...)" in str(told.value)
    assert model.training and not list(tmp_path.iterdir())


class Optional(nn.Module):
    """Scales by a parameter or buffer that may be ``None``, and runs a list of layers."""

    gain: Tensor | None
    mask: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("gain", None)
        self.register_buffer("mask", None, persistent=False)
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        for factor in (self.gain, self.mask):
            x = x if factor is None else x * factor
        return self.last(x)


ADDED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a parameter that was None": (
        lambda part: setattr(part, "gain", nn.Parameter(torch.ones(4))),
        r"'0\.gain' was added",
    ),
    "a buffer that was None": (lambda part: setattr(part, "mask", torch.ones(4)), r"'0\.mask' was added"),
    "a layer": (lambda part: part.layers.append(nn.Linear(4, 4)), r"'0\.layers\.1' was added"),
    "a parameter": (lambda part: part.register_parameter("new", nn.Parameter(torch.ones(4))), r"'0\.new' was added"),
    "no bias any more": (lambda part: setattr(part.last, "bias", None), r"'0\.last\.bias' is gone"),
}


@pytest.mark.parametrize(("change", "words"), ADDED.values(), ids=ADDED)
def test_the_next_call_finds_what_was_added_or_taken_away(change: Callable[[Any], Any], words: str) -> None:
    model = fractrainify(nn.Sequential(Optional()), config=FLOAT, example_inputs=(ROWS,))
    model(ROWS)
    change(original_of(model)[0])
    with pytest.raises(ModelError, match=words):
        model(ROWS)


def test_methods_that_change_the_structure_raise_at_once() -> None:
    with pytest.raises(ModelError, match="'fc' was Linear"):
        resnet().reset_classifier(4)
    with pytest.raises(ModelError, match=r"wte\.weight' had shape"):
        gpt2().resize_token_embeddings(70, mean_resizing=False)


def test_the_next_call_and_the_end_of_an_epoch_find_a_replaced_module() -> None:
    model = net()
    engine = Engine(model)
    engine.loss(model(ROWS).mean()).backward()
    model.block.one = nn.Linear(8, 8)
    with pytest.raises(ModelError, match=r"'block\.one'"):
        engine.end_epoch()
    with pytest.raises(ModelError, match=r"'block\.one'"):
        model(ROWS)


def test_the_way_out_gives_the_changed_model() -> None:
    model = resnet()
    with pytest.raises(ModelError, match="'fc'"):
        model.reset_classifier(4)
    plain: Any = model.restore(structure_changed=True)
    assert plain.fc.out_features == 4
    assert fractrainify(plain, config=FLOAT, example_inputs=(IMAGES,))(IMAGES).shape == (2, 4)


def test_moves_casts_copies_and_assigned_checkpoints_are_no_changes(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model in (resnet(), gpt2()):
            model.double().half().float()
            model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)
            model.eval().train()
            twin = copy.deepcopy(model)
            twin.eval().train()
            twin.restore().requires_grad_(False)
            twin.look_for_changes()
            model.save_pretrained(tmp_path)
    model(**text())


def test_an_assigned_checkpoint_leaves_tied_weights_tied() -> None:
    model = gpt2()
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)
    assert model.lm_head.weight is model.transformer.wte.weight is original_of(model).lm_head.weight
    model.tie_weights()
    model.look_for_changes()


def test_batch_norms_may_be_synchronised() -> None:
    model = resnet()
    made: Any = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert made is model and isinstance(model.bn1, nn.SyncBatchNorm)
    model.eval()(IMAGES)
    model.train().look_for_changes()
    assert model.restore() is original_of(model)


class Dense(nn.Module):
    """One way to compute on the parameters that it is given."""

    def __init__(self, fc: nn.Linear) -> None:
        super().__init__()
        self.fc = fc

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


class Blocked(Dense):
    """Another way."""


class Swapping(nn.Module):
    """Puts a part in the place of another that has the same parameters, as BigBird does for short inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.part: Dense = Blocked(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.detach().sum()) > -1e9 and isinstance(self.part, Blocked):  # a value: the module stays one call
            self.part = Dense(self.part.fc)
        return self.part(x)


@pytest.mark.parametrize("method", ["float", "pfq"])
def test_a_part_that_stays_one_call_may_swap_its_own_parts(method: Any) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Swapping(), nn.Linear(4, 4))
    rewritten = fractrainify(model, config=FracConfig(method=method), example_inputs=(torch.randn(3, 4),))
    rewritten(torch.randn(3, 4))
    assert type(model[2].part) is Dense
    rewritten.train().look_for_changes()
    model[2].part = Dense(nn.Linear(4, 4))
    with pytest.raises(ModelError, match=r"'2\.part' was Blocked"):
        rewritten.look_for_changes()


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_a_hook_of_all_modules_that_came_later_is_told_of_at_the_next_call(kind: str) -> None:
    def doubles(*_: Any) -> None:
        return None

    model = fractrainify(Dense(nn.Linear(4, 4)), config=FracConfig(method="float"), example_inputs=(torch.randn(3, 4),))
    handle = getattr(nn.modules.module, f"register_module_{kind}")(doubles)
    try:
        with pytest.warns(FracTrainWarning, match="never run: the .*hook .*doubles of all modules"):
            model(torch.randn(3, 4))
    finally:
        handle.remove()


def test_the_hooks_of_all_modules_by_which_torch_counts_operations_are_no_change() -> None:
    model = fractrainify(Dense(nn.Linear(4, 4)), config=FracConfig(method="float"), example_inputs=(torch.randn(3, 4),))
    with warnings.catch_warnings(), FlopCounterMode(display=False) as counted:
        warnings.simplefilter("error", FracTrainWarning)
        model(torch.randn(3, 4))
    assert counted.get_total_flops() > 0
