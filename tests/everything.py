"""A network with one op of each family that is fused, and its rewrite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fractrain_fx import FracModel
from tests import build

__all__ = ["Everything", "rewritten"]


class Everything(nn.Module):
    """One op of each family that is fused, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding="same", groups=2)
        self.plane = nn.Conv2d(1, 2, 3, padding=1, stride=2)
        self.up = nn.ConvTranspose1d(8, 8, 2, stride=2)
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)
        self.bias = nn.Parameter(torch.zeros(8))
        self.even = nn.Conv1d(8, 8, 2, padding="same")
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.conv(x.mT).mT
        y = self.up(x.mT).mT.tanh()
        y = y @ self.weight
        scores = torch.einsum("bqc,bkc->bqk", y, y) / 4
        y = torch.bmm(scores.softmax(-1), y).relu()
        y = torch.addmm(self.bias, y.flatten(0, 1), self.weight, beta=0.5, alpha=2.0).view_as(y).relu()
        y = torch.baddbmm(y, scores.softmax(-1), y, alpha=0.5).relu()
        y = y + self.plane(y[:, None]).mean() + self.even(y.mT).mT
        return self.head(y.relu().mean(1))


def rewritten(method: str, **changes: Any) -> tuple[FracModel, Tensor]:
    """The network with the paper's settings, and a batch."""
    x = torch.randn(4, 6, 8)
    return build.rewritten(Everything(), x, config=build.paper(method, **changes)), x
