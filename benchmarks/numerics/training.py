"""The loop of the short trainings that estimates are compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["learn"]


def learn(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[tuple[Any, Tensor]],
    criterion: Callable[[Any, Tensor], Tensor],
    warm_up: int = 0,
) -> list[float]:
    """Train on the batches, one step each, and return the loss of each step.

    With ``warm_up`` the rate rises over so many steps and falls to a tenth by a cosine, and gradients are clipped at 1.
    """
    losses = []
    model.train()
    rate, steps = optimizer.param_groups[0]["lr"], len(batches)
    for step, (inputs, targets) in enumerate(batches):
        loss = criterion(model(**inputs) if isinstance(inputs, dict) else model(inputs), targets)
        loss.backward()
        if warm_up:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            risen, fallen = min(1.0, (step + 1) / warm_up), 0.55 + 0.45 * math.cos(math.pi * step / steps)
            optimizer.param_groups[0]["lr"] = rate * risen * fallen
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses
