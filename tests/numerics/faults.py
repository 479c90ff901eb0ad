"""Small models with a fault planted in one op: what a comparison and a watched step must find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import timm
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from fractrain_fx import FracConfig, FracModel, Pin, Precision
from fractrain_fx.numerics import Statistics
from tests.build import rewritten as build_rewritten

__all__ = ["FAULTS", "MODELS", "Fault", "Subject", "loss_of", "rewritten"]

EIGHT = FracConfig(method="static", precision="FW-8/BW-8")
NVFP4 = FracConfig(method="static", precision="FW-4/BW-4", format="nvfp4")


@dataclass(frozen=True)
class Subject:
    """A model and the ops that faults are planted in.

    Attributes:
        build: makes the model.
        batch: one batch, as ``compare`` takes it.
        pinned: an op for too few bits.
        coarse: the operand of it that 2 bits hurt most, of those that are checked first.
        weight: an op for a faulty weight.
        kill: makes a layer dead; returns the op that reads it.
        overflow: makes a channel or head overflow; returns the op and the operand in which it shows first.
    """

    build: Callable[[], nn.Module]
    batch: Any
    pinned: str
    coarse: str
    weight: str
    kill: Callable[[nn.Module], str]
    overflow: Callable[[nn.Module], tuple[str, str]]


@dataclass(frozen=True)
class Fault:
    """What is planted, and what must be found.

    Attributes:
        plant: changes the model or the configuration; returns the configuration, and op, operand and product to name.
        kind: the kind of the finding.
        shows: whether a watched step shows it in the statistics of that operand.
    """

    plant: Callable[[Subject, nn.Module], tuple[FracConfig, str, str, str]]
    kind: str
    shows: Callable[[Statistics], bool]


def _resnet() -> nn.Module:
    sizes: dict[str, Any] = {"layers": (1, 2, 1, 1), "channels": (8, 16, 16, 16), "stem_width": 8}
    return timm.create_model("resnet18", **sizes, num_classes=10, zero_init_last=False)


def _vit() -> nn.Module:
    sizes: dict[str, Any] = {
        "img_size": 16,
        "patch_size": 4,
        "depth": 2,
        "embed_dim": 48,
        "num_heads": 3,
        "num_classes": 10,
    }
    return timm.create_model("vit_tiny_patch16_224", **sizes)


def _gpt2() -> nn.Module:
    sizes: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 64, "n_positions": 32}
    dropouts: dict[str, Any] = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, bos_token_id=0, eos_token_id=0))


def _set(parameter: Tensor, place: Any, value: float) -> None:
    with torch.no_grad():
        parameter[place] = value


def _kill_relu(model: nn.Module) -> str:
    _set(model.get_parameter("layer2.1.bn1.bias"), ..., -1e3)
    return "layer2.1.conv2"


def _kill_mlp(path: str, reader: str) -> Callable[[nn.Module], str]:
    def kill(model: nn.Module) -> str:
        _set(model.get_parameter(path), ..., -1e4)  # GELU is exactly 0 there
        return reader

    return kill


def _overflow_channel(model: nn.Module) -> tuple[str, str]:
    _set(model.get_parameter("layer2.1.bn1.weight"), 3, 1e5)
    return "layer2.1.conv2", "x"


def _overflow_head(path: str, values: slice, op: str) -> Callable[[nn.Module], tuple[str, str]]:
    """The values of one head, by the bias of the layer that makes queries, keys and values."""

    def overflow(model: nn.Module) -> tuple[str, str]:
        _set(model.get_parameter(path), values, 1e5)
        return op, "y"

    return overflow


_DRAWN = torch.Generator().manual_seed(0)
_IMAGES = torch.randn(8, 3, 32, 32, generator=_DRAWN)
_LABELS = torch.randint(10, (8,), generator=_DRAWN)
_TOKENS = torch.randint(64, (4, 16), generator=_DRAWN)

MODELS = {
    "resnet18": Subject(
        _resnet, (_IMAGES, _LABELS), "layer3.0.conv2", "w", "layer2.0.conv2", _kill_relu, _overflow_channel
    ),
    "vit": Subject(
        _vit,
        (_IMAGES[..., :16, :16], _LABELS),
        "blocks.1.attn.qkv",
        "x",
        "blocks.0.mlp.fc2",
        _kill_mlp("blocks.1.mlp.fc1.bias", "blocks.1.mlp.fc2"),
        _overflow_head("blocks.1.attn.qkv.bias", slice(112, 128), "blocks.1.attn.qkv"),
    ),
    "gpt2": Subject(
        _gpt2,
        {"input_ids": _TOKENS, "labels": _TOKENS},
        "transformer.h.1.attn.c_attn",
        "x",
        "transformer.h.0.mlp.c_proj",
        _kill_mlp("transformer.h.1.mlp.c_fc.bias", "transformer.h.1.mlp.c_proj"),
        _overflow_head("transformer.h.1.attn.c_attn.bias", slice(64, 80), "transformer.h.1.attn.c_attn"),
    ),
}


def _two_bits(subject: Subject, model: nn.Module) -> tuple[FracConfig, str, str, str]:
    return EIGHT.replace(pins=(Pin(subject.pinned, Precision(2, 8)),)), subject.pinned, subject.coarse, "FW"


def _overflow(subject: Subject, model: nn.Module) -> tuple[FracConfig, str, str, str]:
    return EIGHT, *subject.overflow(model), "FW"


def _dead(subject: Subject, model: nn.Module) -> tuple[FracConfig, str, str, str]:
    return EIGHT, subject.kill(model), "x", "FW"


def _large_weight(subject: Subject, model: nn.Module) -> tuple[FracConfig, str, str, str]:
    with torch.no_grad():
        model.get_parameter(f"{subject.weight}.weight").mul_(1e4)
    return EIGHT, subject.weight, "w", "FW"


def _block_scales(subject: Subject, model: nn.Module) -> tuple[FracConfig, str, str, str]:
    weight = model.get_parameter(f"{subject.weight}.weight")
    _set(weight, (0,) * weight.ndim, 1e6)
    return NVFP4, subject.weight, "w", "FW"


def _coarse_gradient(subject: Subject, model: nn.Module) -> tuple[FracConfig, str, str, str]:
    return EIGHT.replace(pins=(Pin(subject.pinned, Precision(8, 2)),)), subject.pinned, "g", "EB"


FAULTS = {
    "a layer at 2 bits": Fault(
        _two_bits, "rounding", lambda seen: seen.bits == 2 and seen.sqnr is not None and seen.sqnr < 9
    ),
    "an overflow in one head or channel": Fault(_overflow, "outlier", lambda seen: seen.largest > 1e4),
    "a dead layer": Fault(_dead, "zero", lambda seen: seen.zero == 1.0),
    "a weight scaled by 1e4": Fault(_large_weight, "magnitude", lambda seen: seen.largest > 100),
    "block scales that saturate": Fault(_block_scales, "block scales", lambda seen: (seen.saturated or 0.0) > 0.5),
    "a gradient of too few bits": Fault(
        _coarse_gradient, "rounding", lambda seen: seen.bits == 2 and seen.sqnr is not None and seen.sqnr < 3
    ),
}


def rewritten(model: nn.Module, batch: Any, config: FracConfig) -> FracModel:
    """A subject, rewritten on its batch."""
    if isinstance(batch, dict):
        return build_rewritten(model, keywords=batch, config=config)
    return build_rewritten(model, batch[0], config=config)


def loss_of(model: Any, batch: Any) -> Tensor:
    """The loss of a subject on its batch."""
    loss: Tensor
    if isinstance(batch, dict):
        loss = model(**batch).loss
    else:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    return loss
