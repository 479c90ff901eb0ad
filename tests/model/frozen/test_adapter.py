"""Adapters of PEFT that were trained on a rounded base: the folder says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

from fractrain_fx import FracConfig, FracModel, Pin, fractrainify
from fractrain_fx.errors import ConfigError, FracTrainWarning, ModelError
from tests.build import rewritten


def llama() -> FracModel:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=32))
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    words = torch.randint(32, (2, 8))
    batch = {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words}
    config = FracConfig(weight_bits=4, pins=(Pin("last", "FW-8/BW-8"),))
    return rewritten(adapted, keywords=batch, config=config)


@pytest.mark.filterwarnings("ignore:Could not find a config file")
@pytest.mark.parametrize("packed", [False, True])
def test_saved_adapters_name_their_base_and_its_widths(packed: bool, tmp_path: Path) -> None:
    model = llama()
    if packed:
        model.pack_frozen()
    with pytest.raises(ConfigError, match=r"save_adapter\(directory, base="):
        model.save_adapter(tmp_path)
    for _ in range(2):  # a second time replaces the section
        model.save_adapter(tmp_path, base="someone/llama")
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == "someone/llama"
    record = json.loads((tmp_path / "fractrain_fx.json").read_text())
    assert record["base"] == "someone/llama" and FracConfig.from_dict(record["config"]).weight_bits == 4
    assert sorted(record["bits"].values()) == [4] * 7 + [8]
    card = (tmp_path / "README.md").read_text()
    assert card.count("## Rounded base") == 1
    assert (
        "trained on `someone/llama` with rounded weights" in card and "7 weights to 4 bits, 1 weight to 8 bits" in card
    )
    base = transformers.LlamaForCausalLM(model.config)
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path))  # PEFT reads it as any adapter
    assert torch.equal(
        loaded.get_parameter("base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight"),
        model.get_parameter("base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight"),
    )
    with pytest.warns(FracTrainWarning, match=r"save_adapter\(folder\)"):
        model.restore()


def test_a_model_without_adapters_is_told_what_saves_it(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model = fractrainify(net, config=FracConfig(method="static"), example_inputs=(torch.randn(2, 4),), check=False)
    with pytest.raises(ModelError, match="save_pretrained a whole model"):
        model.save_adapter(tmp_path)
