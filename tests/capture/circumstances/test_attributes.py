"""Attributes of the original that are set after it was rewritten."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers
from torch import Tensor, nn

from fractrain_fx import Engine, fractrainify
from fractrain_fx.errors import FracTrainWarning, ModelError
from tests.build import rewritten as build_rewritten
from tests.capture.circumstances.models import FLOAT, IMAGES, ROWS, gpt2, net, original_of


def test_setting_one_that_was_read_warns_once_and_reaches_the_original() -> None:
    model = net()
    with pytest.warns(FracTrainWarning, match=r"without effect.*tau was 2\.0.*is 0\.5.*restore\(\)\) again") as told:
        model.tau = 0.5
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.tau = 0.25
        model(ROWS)
    assert model.tau == 0.25
    again = fractrainify(model.restore(), config=FLOAT, example_inputs=(ROWS,)).eval()
    assert (again(ROWS) == model.restore().eval()(ROWS)).all()


def test_one_of_a_submodule_is_found_at_the_next_call() -> None:
    model = net()
    model.block.warm = False
    with pytest.warns(FracTrainWarning, match=r"block\.warm was True") as told:
        model(ROWS)
    assert told[0].filename == __file__


def test_one_set_behind_the_back_is_found_at_a_mode_switch_and_at_the_end_of_an_epoch() -> None:
    model = net()
    original_of(model).p = 0.0
    with pytest.warns(FracTrainWarning, match=r"p was 0\.5 .* is 0\.0"):
        model.eval()
    model.train()
    engine = Engine(model)
    engine.loss(model(ROWS).mean()).backward()
    original_of(model).block.warm = False
    with pytest.warns(FracTrainWarning, match=r"block\.warm"):
        engine.end_epoch()


class Settings:
    scale = 2.0


class Reads(nn.Module):
    sizes: tuple[int, ...] = (1, 2)

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.cfg, self.space = Settings(), SimpleNamespace(sub=SimpleNamespace(k=2.0))
        self.options, self.factors, self.table = {"k": 1.0}, [1.0, 2.0], np.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.cfg.scale * self.space.sub.k * getattr(self, "gain", 1.0) * sum(self.sizes)
        return self.fc(x) * scale * self.options["k"] * sum(self.factors) * float(self.table.sum())


SET: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a field of an object": (lambda net: setattr(net.cfg, "scale", 3.0), r"cfg\.scale was 2\.0"),
    "a field of a namespace": (lambda net: setattr(net.space.sub, "k", 3.0), r"space\.sub\.k was 2\.0"),
    "a missing attribute": (lambda net: setattr(net, "gain", 3.0), r"gain was not there .* is 3\.0"),
    "an attribute of the class": (lambda net: setattr(net, "sizes", (5, 5)), r"sizes was \(1, 2\)"),
    "an entry": (lambda net: net.options.update(k=3.0), r"options was \{'k': 1\.0\}"),
    "an item": (lambda net: net.factors.__setitem__(0, 3.0), r"factors was \[1\.0, 2\.0\]"),
    "an item more": (lambda net: net.factors.append(3.0), r"factors was \[1\.0, 2\.0\]"),
}


@pytest.mark.parametrize(("change", "words"), SET.values(), ids=SET)
def test_the_next_call_tells_once_of_what_forward_reads(change: Callable[[Any], Any], words: str) -> None:
    model = fractrainify(Reads(), config=FLOAT, example_inputs=(ROWS,))
    change(original_of(model))
    with pytest.warns(FracTrainWarning, match=words):
        model(ROWS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ROWS)
        model.eval()


class Named(nn.Linear):
    """Looks itself up in a dictionary of weak references, whose keys have no length."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scales = weakref.WeakKeyDictionary({self: 2.0})

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scales[self]


def test_a_dictionary_of_weak_references_may_be_read() -> None:
    plain = nn.Sequential(Named(), nn.Linear(4, 4))
    model = fractrainify(plain, config=FLOAT, example_inputs=(ROWS,))
    assert (model(ROWS) == plain(ROWS)).all()


def test_a_mode_switch_tells_of_changed_arrays() -> None:
    model = fractrainify(Reads(), config=FLOAT, example_inputs=(ROWS,))
    original_of(model).table[0] = 3
    with pytest.warns(FracTrainWarning, match="table was"):
        model.eval()


def test_a_missing_attribute_is_set_on_the_original() -> None:
    model = fractrainify(Reads(), config=FLOAT, example_inputs=(ROWS,))
    with pytest.warns(FracTrainWarning, match="gain was not there"):
        model.gain = 3.0
    assert original_of(model).gain == 3.0


def test_config_is_the_models_own_and_a_changed_field_of_it_is_found() -> None:
    model = gpt2()
    assert model.config is original_of(model).config and model.frac_config == FLOAT.replace(**{"run.backend": "plain"})
    model.config.output_hidden_states = True
    with pytest.warns(FracTrainWarning, match=r"config\.output_hidden_states"):
        model.eval()


def test_what_nothing_read_may_be_set() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = net()
        model.note = "a run of Tuesday"
        model.mine = 3
        model.tau = 2.0
        gpt = gpt2()
        original_of(gpt).config.use_cache = False
        original_of(gpt).config.pad_token_id = 5
        for each in (model, gpt):
            each.eval().train()
    assert original_of(model).note == "a run of Tuesday" and not hasattr(original_of(model), "mine")


def test_a_configuration_without_caches_may_be_told_to_keep_none() -> None:
    sizes: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    vit = transformers.ViTForImageClassification(transformers.ViTConfig(image_size=32, patch_size=16, **sizes))
    model = build_rewritten(vit, IMAGES, config=FLOAT)
    assert not hasattr(vit.config, "use_cache")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FracTrainWarning)
        vit.config.use_cache = False  # as Hugging Face's Trainer sets it on every model
        model.eval()(IMAGES)
    vit.config.use_cache = True
    with pytest.warns(FracTrainWarning, match=r"config\.use_cache was not there .* and is True"):
        model.train()


def test_a_copy_is_tied_to_its_own_original() -> None:
    model = net()
    twin = copy.deepcopy(model)
    original_of(twin).block.warm = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ROWS)
    with pytest.warns(FracTrainWarning, match=r"block\.warm"):
        twin(ROWS)


def test_a_module_or_parameter_that_the_graph_runs_is_not_set() -> None:
    model = net()
    with pytest.raises(ModelError, match=r"down = Linear\(\.\.\.\) would replace a Linear.*fractrainify\(plain\)"):
        model.down = nn.Linear(8, 2)
    with pytest.raises(ModelError, match="would add a part"):
        model.extra = nn.Linear(8, 2)
    with pytest.raises(ModelError, match="would replace"):
        model.down = None
    model.down = model.down
    assert model(ROWS).shape == (3, 4)
