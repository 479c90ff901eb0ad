"""Gates that choose what a test says, and the masked form without the one gradient that dispatched blocks lack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fractrain_fx import FracModel
from fractrain_fx.nn.gates import Controller, Skip

__all__ = ["choose", "without_gradient_of_skipping"]


def choose(model: FracModel, *options: Sequence[int]) -> None:
    """Let the samples of a batch choose these options: a row of numbers for each block in turn, from the first again.

    Where a block cannot be skipped, samples that were to skip it take option 1.
    """
    head = _Chosen(
        model.get_submodule("frac.controller.head"), [torch.tensor(row, dtype=torch.int64) for row in options]
    )
    cast(Controller, model.get_submodule("frac.controller")).head = head  # type: ignore[assignment]

    def restart(*_: object) -> None:
        head.calls = 0

    model.register_forward_pre_hook(restart)


class _Chosen(nn.Module):
    """The controller's head, with the chosen option of each sample far above the others."""

    def __init__(self, head: nn.Module, options: list[Tensor]) -> None:
        super().__init__()
        self.head, self.options, self.calls = head, options, 0

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(hidden)
        chosen = self.options[self.calls % len(self.options)]
        self.calls += 1
        first, second = F.one_hot(chosen, logits.shape[1]), F.one_hot(chosen.clamp(min=1), logits.shape[1])
        return logits + 100.0 * first + 50.0 * second


def without_gradient_of_skipping(model: FracModel) -> None:
    """Take from the masked form what a skipped sample's choice of skipping gets through its branch."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Skip):
                setattr(module, name, _SkipWithoutGradient(child.batch))


class _SkipWithoutGradient(Skip):
    def forward(self, branch: Tensor, choice: Tensor) -> Tensor:
        runs = choice[:, :1] == 0
        return super().forward(branch, torch.where(runs, choice, choice.detach()))
