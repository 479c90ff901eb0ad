"""The models of the matrix, small, from their configurations: this file needs no fractrain_fx."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import timm
import transformers
from torch import nn

__all__ = ["IMAGES", "MODELS", "llama"]

IMAGES = {"ResNet-18": 64, "MobileNetV2": 64, "ViT-Tiny": 32}
"""The side of the images of the models that take images."""

_HEADS: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
_SIZES: dict[str, Any] = {"vocab_size": 128, "max_position_embeddings": 64, "num_hidden_layers": 2}


def llama(**sizes: Any) -> nn.Module:
    """A small LLaMA."""
    settings = {**_HEADS, **_SIZES, "num_key_value_heads": 2} | sizes
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))


def _mixtral() -> nn.Module:
    settings = {**_HEADS, **_SIZES, "num_key_value_heads": 2, "num_local_experts": 4}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**settings))


def _gpt2() -> nn.Module:
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=64, **ends)
    return transformers.GPT2LMHeadModel(config)


def _vit() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-18": lambda: timm.create_model("resnet18", num_classes=10),
    "MobileNetV2": lambda: timm.create_model("mobilenetv2_100", num_classes=10),
    "ViT-Tiny": _vit,
    "BERT": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**_HEADS, **_SIZES)),
    "GPT-2": _gpt2,
    "LLaMA": llama,
    "Mixtral": _mixtral,
}
