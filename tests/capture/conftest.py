"""Models that tests record, each with the call that it is recorded with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import nn

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def images(size: int) -> torch.Tensor:
    """Two random images."""
    return torch.randn(2, 3, size, size)


def timm_call(name: str, size: int, **options: Any) -> Call:
    """A timm model with random weights on two images."""
    return timm.create_model(name, num_classes=7, **options), (images(size),), {}


def tokens(labels: bool = True) -> dict[str, torch.Tensor]:
    """Two padded sentences: attention masks without padding would leave the mask out of the graph."""
    ids = torch.randint(5, 64, (2, 12))
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, -4:] = 0
    mask[1, -1:] = 0
    call = {"input_ids": ids, "attention_mask": mask}
    return call | {"labels": ids.masked_fill(mask == 0, -100)} if labels else call


def huggingface_call(name: str) -> Call:
    """A tiny Hugging Face model from its config."""
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 48, "max_position_embeddings": 64}
    gpt2: dict[str, Any] = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    t5: dict[str, Any] = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    t5["decoder_start_token_id"] = 0
    experts: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    loop = sizes | experts | {"experts_implementation": "eager"}
    picture: dict[str, Any] = {key: sizes[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    makers: dict[str, Callable[[], nn.Module]] = {
        "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**sizes)),
        "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**gpt2)),
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)),
        "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**t5)),
        "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **experts)),
        "mixtral with a loop over experts": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**loop)),
        "vit": lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(**picture, intermediate_size=48, image_size=32, patch_size=8)
        ),
    }
    inputs = {"pixel_values": images(32), "labels": torch.tensor([0, 1])} if name == "vit" else tokens()
    return makers[name](), (), inputs
