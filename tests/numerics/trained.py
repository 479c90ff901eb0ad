"""Small models that have learnt something, with batches and a loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.integrations.digits import digits

__all__ = ["Trained", "conv_net", "gpt2"]


class Trained(NamedTuple):
    """A model with batches that it has not seen, and its loss."""

    model: nn.Module
    batches: list[Any]
    criterion: Callable[[Any, Any], Tensor]


def conv_net(seed: int = 0, steps: int = 60) -> Trained:
    """Four convolutions with batch normalisation, on handwritten digits."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 8), (8, 16), (16, 16), (16, 24)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    layers.insert(6, nn.MaxPool2d(2))
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10))
    images, targets = digits(1600).tensors
    batches = list(zip(images.split(64), targets.long().split(64), strict=True))
    return _trained(model, batches, F.cross_entropy, steps)


def gpt2(seed: int = 0, steps: int = 60) -> Trained:
    """Two layers that continue a row of numbers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=24, n_positions=16, n_embd=32, n_layer=2, n_head=2, use_cache=False)
    config.bos_token_id = config.eos_token_id = None
    first = torch.randint(24, (1600, 1))
    stride = torch.randint(1, 4, (1600, 1))
    tokens = (first + stride * torch.arange(16) + (torch.rand(1600, 16) < 0.1)) % 24
    batches = [{"input_ids": each, "labels": each} for each in tokens.split(64)]
    return _trained(GPT2LMHeadModel(config), batches, None, steps)


def _trained(model: nn.Module, batches: Sequence[Any], criterion: Any, steps: int) -> Trained:
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=3e-3)
    for step in range(steps):
        batch = batches[step % (len(batches) - 8)]
        loss = model(**batch).loss if criterion is None else criterion(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return Trained(model, list(batches[-8:]), criterion)
