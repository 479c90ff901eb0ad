"""DFQ's gates: an embedding of each block's entry, and one LSTM that chooses for every block (paper 3.2)."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from fractrain_fx.config import GateConfig, GateInit
from fractrain_fx.formats.batch_axis import BatchAxis

__all__ = ["BlockEmbedding", "Controller", "Skip"]

State = tuple[Tensor, Tensor]


class BlockEmbedding(nn.Module):
    """Average a block's entry over its positions and embed the average: Linear, ReLU, Linear (paper 3.2).

    The entry's dimension ``feature_axis`` has size ``features``; ``dims`` are the widths of the two linear layers.
    ``init`` says how their weights are drawn (``GateConfig.init``); biases start as those of ``nn.Linear``.
    """

    def __init__(
        self,
        features: int,
        feature_axis: int,
        batch: BatchAxis,
        dims: tuple[int, int],
        init: GateInit,
    ) -> None:
        super().__init__()
        self.feature_axis, self.batch = feature_axis, batch
        self.hidden = nn.Linear(features, dims[0])
        self.output = nn.Linear(dims[0], dims[1])
        if init == "he":
            for layer in (self.hidden, self.output):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor, samples: int | None = None) -> Float[Tensor, "batch dims"]:
        """Embed an entry, of any shape with one feature and one batch dimension: one row for each sample.

        ``samples`` is the number of samples, if each has several rows.
        """
        axes = {self.feature_axis % x.ndim} if self.batch.whole else {self.feature_axis % x.ndim, self.batch.axis}
        positions = [dim for dim in range(x.ndim) if dim not in axes]
        if positions:
            # Not `mean`, whose backward divides as many values as the entry has.
            total = x.sum(positions, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
            x = total / prod([x.shape[dim] for dim in positions])  # torch's compiler cannot trace a generator here
        rows = x.shape[self.batch.axis]
        pooled = self.batch.samples_first(x.to(self.hidden.weight.dtype), samples)
        # One dimension may hold samples and features (as in a convolution whose samples have different kernels).
        if self.batch.folded and self.feature_axis % x.ndim != self.batch.axis:
            pooled = pooled.view(len(pooled), rows // max(len(pooled), 1), -1).mean(dim=1)
        return self.embed(pooled)

    def embed(self, pooled: Float[Tensor, "batch features"]) -> Float[Tensor, "batch dims"]:
        """The two layers."""
        embedded: Tensor = self.output(F.relu(self.hidden(pooled)))
        return embedded


class Controller(nn.Module):
    """One LSTM cell and one head for all blocks; callers pass its state in and get it back."""

    def __init__(self, config: GateConfig, options: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(config.dims[1], config.hidden)
        self.head = nn.Linear(config.hidden, options)

    def forward(
        self, embedding: Float[Tensor, "batch dims"], state: State | None, skippable: bool
    ) -> tuple[Float[Tensor, "batch options"], State]:
        """Choose an option for each sample.

        The value is the one-hot of the first largest probability; its gradient goes to the probabilities.
        ``skippable=False`` rules out option 0 (FW-0/BW-0) and gives it no gradient.
        """
        state = self.cell(embedding, state)
        logits = self.head(state[0])
        if not skippable:
            logits = torch.cat([torch.full_like(logits[:, :1], -torch.inf), logits[:, 1:]], dim=1)
        choice: Tensor = _StraightThrough.apply(logits.softmax(dim=-1))
        return choice, state


class _StraightThrough(torch.autograd.Function):
    """The one-hot of the first largest probability, with the identity as its gradient."""

    @staticmethod
    def forward(ctx: Any, probabilities: Tensor) -> Tensor:
        first = probabilities.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(probabilities).scatter(-1, first, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads


class Skip(nn.Module):
    """Drop a block's branch for the samples that chose FW-0/BW-0: ``(1 - choice_0) * branch`` (paper equation 1)."""

    def __init__(self, batch: BatchAxis) -> None:
        super().__init__()
        self.batch = batch

    def forward(self, branch: Tensor, choice: Float[Tensor, "batch options"]) -> Tensor:
        """Mask the branch; same shape and dtype."""
        keep = (1 - choice[:, 0]).to(branch.dtype)
        return branch * self.batch.expand(keep, branch.shape)
