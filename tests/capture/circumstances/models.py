"""Models that tests change after they were rewritten."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from fractrain_fx import FracConfig, FracModel
from fractrain_fx.errors import FracTrainWarning
from tests.build import made_once
from tests.build import rewritten as build_rewritten

FLOAT = FracConfig(method="float")
NUMBER = 0
IMAGES = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)
ROWS = torch.linspace(-1, 1, 12).reshape(3, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.warm = True
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        return x + self.two(h.relu() if self.warm else h)


class Net(nn.Module):
    """Reads ``tau`` and ``p``; its block reads ``warm``; nothing reads ``note``."""

    def __init__(self) -> None:
        super().__init__()
        self.tau, self.p, self.note = 2.0, 0.5, ""
        self.up, self.block, self.down = nn.Linear(4, 8), Block(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.block(F.dropout(self.up(x) / self.tau, self.p, self.training)))


def net(config: FracConfig = FLOAT) -> FracModel:
    return build_rewritten(Net(), ROWS, config=config, check=True)


@made_once
def resnet(config: FracConfig = FLOAT) -> FracModel:
    torch.manual_seed(0)
    return build_rewritten(timm.create_model("resnet10t", num_classes=10), IMAGES, config=config, check=True)


def text() -> dict[str, Tensor]:
    tokens = torch.arange(3, 27).reshape(2, 12)
    mask = torch.ones_like(tokens)
    mask[1, 9:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


@made_once
def gpt2(config: FracConfig = FLOAT) -> FracModel:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    tokens: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    original = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **tokens))
    return build_rewritten(original, keywords=text(), config=config, check=True)


def original_of(model: FracModel) -> Any:
    """The original as somebody holds it who kept it from before."""
    return model._state.original


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


def told_once(model: FracModel, change: Callable[[], Any], words: str = "without effect") -> None:
    """Check that a change is told at the next call and no more, and that nothing is told before."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FracTrainWarning)
        model(ROWS)
        model.eval()
        model.train()
    change()
    with pytest.warns(FracTrainWarning, match=words):
        model(ROWS)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FracTrainWarning)
        model(ROWS)
        model.eval()
