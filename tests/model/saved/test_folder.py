"""The folder of a saved model: for this package, for transformers, and for a reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

from fractrain_fx import Engine, FracConfig, FracModel, Pin, fractrainify
from fractrain_fx.errors import RunError
from tests.build import rewritten
from tests.models import build


def gpt2() -> nn.Module:
    sizes: dict[str, Any] = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 32}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def words() -> dict[str, torch.Tensor]:
    tokens = torch.randint(32, (2, 8))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def trained(epochs: int = 2, **config: Any) -> FracModel:
    model = rewritten(gpt2(), keywords=words(), **config)
    engine, optimizer = Engine(model, epochs=epochs), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for _ in range(2):
            engine.loss(model(**words()).loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.end_epoch()
    return model


def logits(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(**batch).logits
    return found


@pytest.mark.parametrize("method", ["pfq", "fractrain"])
def test_transformers_loads_the_float_model_and_this_package_the_trained_one(method: str, tmp_path: Path) -> None:
    model, batch = trained(method=method), words()
    model.save_pretrained(tmp_path)
    read: Any = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    loaded, told = read
    assert type(loaded) is transformers.GPT2LMHeadModel and not told["missing_keys"] and not told["unexpected_keys"]
    assert torch.equal(logits(loaded, batch), logits(model.restore(), batch))
    assert type(AutoModel.from_pretrained(tmp_path)) is transformers.GPT2Model
    again = FracModel.from_pretrained(tmp_path, model=gpt2())
    assert torch.equal(logits(again, batch), logits(model, batch))


@pytest.mark.parametrize("kind", ["codes", "no model of Hugging Face"])
def test_what_transformers_cannot_load_it_refuses_in_one_sentence(kind: str, tmp_path: Path) -> None:
    if kind == "codes":
        net = gpt2().requires_grad_(False)
        net.get_submodule("transformer.ln_f").requires_grad_(True)
        model = fractrainify(net, config=FracConfig(method="static"), example_kwargs=words(), check=False)
        model.pack_frozen()
    else:
        case = build("tied_weights")
        model = fractrainify(case.model, example_inputs=case.args, check=False)
    model.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"Unrecognized model in \S+\. Should have a `model_type` key in its config\.json\.$"
    ):
        AutoModel.from_pretrained(tmp_path)


def test_a_folder_without_a_recipe_is_refused(tmp_path: Path) -> None:
    trained(method="pfq").save_pretrained(tmp_path)
    (tmp_path / "fractrain_fx.json").unlink()
    with pytest.raises(RunError, match="does not hold a model that save_pretrained wrote"):
        FracModel.from_pretrained(tmp_path, model=gpt2())


def test_the_card_names_method_stages_cost_and_results(tmp_path: Path) -> None:
    model = trained(method="pfq", stages="FW(3,4,6,8)/BW(6,6,8,8)", pins=(Pin("*.c_proj", "FW-8/BW-16"),))
    model.save_pretrained(tmp_path / "small", results={"perplexity": 31.25})
    card = (tmp_path / "small" / "README.md").read_text(encoding="utf-8")
    _, front, text = card.split("---\n", 2)
    data = yaml.safe_load(front)
    assert data["library_name"] == "fractrain_fx" and data["model-index"][0]["name"] == "small"
    assert data["model-index"][0]["results"][0]["metrics"] == [{"type": "perplexity", "value": 31.25}]
    for words_ in (
        "`pfq`: the precision rises in stages (PFQ), by `fractrain_fx`, after [the paper](https://arxiv.org/abs/",
        "Pins: `*.c_proj=FW-8/BW-16`",
        "| 1 | FW-3/BW-6 | 1 | ",
        "| 4 | FW-8/BW-8 | 2 | ",
        "% of the bit operations of 32-bit training",
        "| perplexity | 31.25 |",
        "FracModel.from_pretrained('small', model=...)  # a GPT2LMHeadModel",
        "transformers.GPT2LMHeadModel.from_pretrained('small')",
    ):
        assert words_ in text
    assert str(tmp_path) not in card


def test_a_model_that_no_engine_trained_says_so(tmp_path: Path) -> None:
    case = build("tied_weights")
    fractrainify(case.model, example_inputs=case.args, check=False).save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "No engine trained this model yet" in card and "## Results" not in card and "transformers" not in card
    assert json.loads((tmp_path / "config.json").read_text())["architecture"] == "TiedWeights"
