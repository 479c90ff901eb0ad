"""The loss of a batch, for a backward pass outside a training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fractrain_fx.capture.trees import tensors_in
from fractrain_fx.errors import InputError

__all__ = ["Criterion", "loss_of"]

Criterion = Callable[[Any, Any], Tensor]
"""The loss from the model's output and the batch."""


def loss_of(output: Any, batch: Any, criterion: Criterion | None = None) -> Tensor:
    """The loss of a batch.

    Without ``criterion`` it is the output's own ``loss``, or cross-entropy for whole targets, or the mean squared error
    for others; without targets it is the mean square of the output.
    """
    if criterion is not None:
        return criterion(output, batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    floats = [x for x in tensors_in(output) if x.is_floating_point()]
    if not floats:
        raise InputError("the model's output holds no float tensor: pass criterion=lambda output, batch: ...")
    y = floats[0]
    targets = batch[1] if isinstance(batch, tuple | list) and len(batch) > 1 else None
    if targets is None:
        return y.square().mean()
    if targets.is_floating_point() and targets.shape == y.shape:
        return F.mse_loss(y, targets)
    if not targets.is_floating_point() and targets.shape == y.shape[:-1]:
        return F.cross_entropy(y.flatten(0, -2), targets.flatten())
    raise InputError(
        f"no loss is known for an output of shape {tuple(y.shape)} and targets of shape {tuple(targets.shape)}: pass "
        "criterion=lambda output, batch: ..."
    )
