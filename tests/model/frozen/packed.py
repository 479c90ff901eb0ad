"""A small LLaMA with adapters, rewritten, and with its base packed."""

from __future__ import annotations

from typing import Any

import peft
import torch
import transformers

from fractrain_fx import FracConfig, FracModel, Pin
from tests import build

__all__ = ["BATCH", "FIRST", "FRACTRAIN", "HEAD", "PFQ", "llama", "packed", "rewrite", "rewritten"]

WORDS = torch.randint(1, 50, (4, 9), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": WORDS, "attention_mask": torch.ones_like(WORDS), "labels": WORDS}
HEAD = (Pin("last", "FW-8/BW-8"),)
FRACTRAIN = FracConfig(weight_bits=4, pins=HEAD)
PFQ = FracConfig(method="pfq", stages="FW(4,4)/BW(6,8)", pins=HEAD)
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"


def llama(width: int = 32, layers: int = 1, *, tied: bool = False) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": 2 * width - 4,
        "num_hidden_layers": layers,
        "vocab_size": 50,
    }
    sizes |= {"initializer_range": 0.1}  # logits of a trained model are not all near 0
    base = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_attention_heads=4, pad_token_id=0, tie_word_embeddings=tied)
    )
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(base, lora)


def rewrite(model: Any, config: FracConfig = FRACTRAIN) -> FracModel:
    return build.rewritten(model, keywords=BATCH, config=config)


@build.made_once
def rewritten(config: FracConfig = FRACTRAIN) -> FracModel:
    return rewrite(llama(), config)


def packed(config: FracConfig = FRACTRAIN) -> FracModel:
    model = rewritten(config)
    model.pack_frozen()
    return model
