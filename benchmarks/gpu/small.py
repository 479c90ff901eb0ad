"""The small models of the checks."""

from __future__ import annotations

import copy
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.step.subjects import SUBJECTS, Subject
from fractrain_fx import FracConfig, FracModel, fractrainify

__all__ = ["MODELS", "made", "tensor"]

_VIT = Subject(
    "test_vit",
    lambda: timm.create_model("test_vit", num_classes=10, img_size=32),
    {"cpu": 4, "cuda": 4},
    lambda batch: (torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))),
    F.cross_entropy,
)
MODELS = {"resnet10t": SUBJECTS["resnet10t"], "vit": _VIT, "gpt2": SUBJECTS["gpt2-tiny"]}


def made(subject: Subject, config: FracConfig, device: str, model: nn.Module) -> FracModel:
    """A copy of a model, rewritten."""
    x, _ = subject.data(2)
    return fractrainify(copy.deepcopy(model), config=config, example_inputs=(x,), check=False).to(device)


def tensor(output: Any) -> Tensor:
    """The tensor among a model's outputs."""
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits
