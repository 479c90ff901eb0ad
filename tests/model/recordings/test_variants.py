"""A call with other arguments gets a recording of its own, which shares gates and ranges with the first one."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from fractrain_fx import Engine, FracConfig, FracModel, RunConfig, fractrainify
from fractrain_fx.errors import InputError
from tests.build import rewritten

FLOAT = FracConfig(method="float")
IDS = torch.randint(3, 50, (4, 8), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[::2, 5:] = 0


def classifier() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    config = transformers.BertConfig(**sizes, vocab_size=50, max_position_embeddings=16)
    return transformers.AutoModelForSequenceClassification.from_config(config)


def test_labels_are_recorded_by_themselves_and_left_out_ones_are_a_second_recording(caplog: Any) -> None:
    original = classifier()
    caplog.clear()  # the libraries that the first import of a model brings log too
    model = fractrainify(original, config=FLOAT, check=False)
    with caplog.at_level(logging.WARNING, "fractrain_fx"):
        given = model(input_ids=IDS, attention_mask=MASK, labels=IDS[:, 0] % 2)
    assert given.loss.requires_grad and not caplog.records
    model.calibrate([{"input_ids": IDS, "attention_mask": MASK}])
    model.eval()
    for call in ({"attention_mask": MASK}, {}, {"labels": IDS[:, 0] % 2}, {"token_type_ids": IDS % 2}):
        ours, theirs = model(input_ids=IDS, **call), original.eval()(input_ids=IDS, **call)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_batch_that_needs_a_recording_calibrates_as_others_do() -> None:
    labelled, unlabelled = (fractrainify(classifier(), config=FracConfig(method="static"), check=False) for _ in "ab")
    batches = [{"input_ids": ids, "attention_mask": MASK} for ids in (IDS, IDS.flip(0))]
    labelled.calibrate([batch | {"labels": IDS[:, 0] % 2} for batch in batches])
    unlabelled.calibrate(batches)
    found = unlabelled.state_dict()
    assert any(name.endswith("range.seen") for name in found)
    assert all(torch.equal(x, found[name]) for name, x in labelled.state_dict().items())
    assert unlabelled.deployed().difference == 0


def test_all_forms_of_call_train_the_same_gates_and_count_their_own_samples() -> None:
    model = fractrainify(classifier(), config=FracConfig(method="dfq"), check=False)
    engine = Engine(model)
    gates = [p for name, p in model.named_parameters() if name.startswith("frac.gates")]
    for samples, call in ((4, {"labels": IDS[:, 0] % 2}), (3, {})):
        output = model(input_ids=IDS[:samples], **{name: x[:samples] for name, x in call.items()})
        engine.loss(output.logits.square().mean()).backward()
        assert model.batch == samples and all(p.grad is not None for p in gates)
        model.zero_grad()
    assert len(list(model._state.variants)) == 2 + 1  # with mask and labels, with labels, with neither


class Scaled(nn.Module):
    """Takes a second tensor, and a number that its code reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: Tensor, shift: Tensor | None = None, scale: float = 1.0) -> Tensor:
        x = self.layers(x) * scale
        return x if shift is None else x + shift


X = torch.ones(2, 4)


def scaled(**config: Any) -> tuple[Scaled, FracModel]:
    original = Scaled()
    return original, rewritten(original, X, config=FLOAT.replace(**config))


def test_each_value_of_a_number_needs_a_recording_and_there_are_only_so_many(caplog: Any) -> None:
    original, model = scaled(run=RunConfig(recordings=2))
    assert torch.equal(model(X, scale=2.0), original(X, scale=2.0))
    assert caplog.messages[-1].endswith("argument 'scale' is 2.0, but the graph was recorded with 1.0")
    assert torch.equal(model(X), original(X))
    with pytest.raises(InputError, match=r"'scale' is 3\.0.*recorded with 1\.0.*2 recordings already.*recordings="):
        model(X, scale=3.0)


def test_arguments_that_the_model_does_not_take_are_refused_with_both_reasons() -> None:
    _, model = scaled()
    with pytest.raises(InputError, match=r"'shfit' is a tensor.*cannot be recorded again.*do not fit Scaled\.forward"):
        model(X, shfit=X)


@pytest.mark.long
def test_a_compiled_model_is_recorded_for_another_form_before_its_compiled_call() -> None:
    original, model = scaled()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(X, torch.ones(2, 2)), original(X, torch.ones(2, 2)))
    assert torch.equal(compiled(X), original(X))
