"""The loop of the short trainings that estimates are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["learn"]


def learn(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[Any, Tensor]],
    criterion: Callable[[Any, Tensor], Tensor],
) -> list[float]:
    """Train on the batches, one step each, and return the loss of each step."""
    losses = []
    model.train()
    for inputs, targets in batches:
        loss = criterion(model(**inputs) if isinstance(inputs, dict) else model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses
