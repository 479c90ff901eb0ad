"""The models whose steps are measured, each with a batch and its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import timm
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from fractrain_fx.zoo.models import mobilenetv2, resnet38
from fractrain_fx.zoo.models.transformer import TransformerLM

__all__ = ["SUBJECTS", "Subject", "next_token_loss", "tokens"]

# Small, so that the head, which no method quantizes, does not hide the cost of the layers.
VOCABULARY = 1000
LENGTH = 128


@dataclass(frozen=True)
class Subject:
    """A model to measure.

    Attributes:
        title: a description.
        build: builds it with random weights.
        batch: samples in a step, on a CPU and on a GPU.
        data: gives inputs and targets for a number of samples.
        loss: the loss of output and targets.
    """

    title: str
    build: Callable[[], nn.Module]
    batch: dict[str, int]
    data: Callable[[int], tuple[Tensor, Tensor]]
    loss: Callable[[Any, Tensor], Tensor]


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over all positions."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _images(side: int, classes: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    def data(batch: int) -> tuple[Tensor, Tensor]:
        return torch.randn(batch, 3, side, side), torch.randint(classes, (batch,))

    return data


def tokens(length: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Random token ids of so many positions, and the next token of each."""

    def data(batch: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(VOCABULARY, (batch, length + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return data


def _causal_loss(output: Any, targets: Tensor) -> Tensor:
    """As :func:`next_token_loss`, of the output of a Hugging Face model."""
    return next_token_loss(output.logits, targets)


def _gpt2(length: int, **sizes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        config = transformers.GPT2Config(
            n_positions=length, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes
        )
        model: nn.Module = transformers.GPT2LMHeadModel(config)
        return model

    return build


def _transformer() -> nn.Module:
    # No dropout: drawing its masks is serial on a CPU and would make every ratio look better.
    return TransformerLM(VOCABULARY, dropout=0.0)


SUBJECTS = {
    "resnet38": Subject(
        "ResNet-38 (zoo), 32 x 32 pixels", resnet38, {"cpu": 32, "cuda": 128}, _images(32, 10), F.cross_entropy
    ),
    "mobilenetv2": Subject(
        "MobileNetV2 (zoo), 32 x 32 pixels", mobilenetv2, {"cpu": 32, "cuda": 128}, _images(32, 10), F.cross_entropy
    ),
    "resnet18": Subject(
        "ResNet-18 (timm), 64 x 64 pixels",
        lambda: timm.create_model("resnet18"),
        {"cpu": 16, "cuda": 128},
        _images(64, 1000),
        F.cross_entropy,
    ),
    "resnet10t": Subject(
        "ResNet-10t (timm), 32 x 32 pixels",
        lambda: timm.create_model("resnet10t", num_classes=10),
        {"cpu": 16, "cuda": 128},
        _images(32, 10),
        F.cross_entropy,
    ),
    "resnet50": Subject(
        "ResNet-50 (timm), 224 x 224 pixels",
        lambda: timm.create_model("resnet50"),
        {"cpu": 4, "cuda": 64},
        _images(224, 1000),
        F.cross_entropy,
    ),
    "vit_small": Subject(
        "ViT-S/16 (timm), 224 x 224 pixels",
        lambda: timm.create_model("vit_small_patch16_224"),
        {"cpu": 4, "cuda": 64},
        _images(224, 1000),
        F.cross_entropy,
    ),
    "vit_deep": Subject(
        "ViT of 24 layers of width 48 (timm), 32 x 32 pixels",
        lambda: timm.create_model(
            "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=24, num_heads=2, num_classes=10
        ),
        {"cpu": 4, "cuda": 128},
        _images(32, 10),
        F.cross_entropy,
    ),
    "vit_tiny": Subject(
        "ViT-Tiny/16 (timm), 224 x 224 pixels",
        lambda: timm.create_model("vit_tiny_patch16_224"),
        {"cpu": 4, "cuda": 64},
        _images(224, 1000),
        F.cross_entropy,
    ),
    "transformer-base": Subject(
        f"Transformer-base (zoo), {LENGTH} tokens a sample, vocabulary {VOCABULARY}, no dropout",
        _transformer,
        {"cpu": 8, "cuda": 32},
        tokens(LENGTH),
        next_token_loss,
    ),
    "gpt2": Subject(
        "GPT-2 of 124M (transformers), 512 tokens a sample, no dropout",
        _gpt2(512),
        {"cpu": 1, "cuda": 8},
        tokens(512),
        _causal_loss,
    ),
    "gpt2-tiny": Subject(
        "GPT-2 of 1 layer and 32 channels (transformers), 16 tokens a sample, no dropout",
        _gpt2(16, n_layer=1, n_embd=32, n_head=2, vocab_size=VOCABULARY),
        {"cpu": 4, "cuda": 32},
        tokens(16),
        _causal_loss,
    ),
}
