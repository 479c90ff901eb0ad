"""A residual network small enough to train in a second, as a user's own file would hold it."""

from __future__ import annotations

import torch
from torch import nn


class TinyNet(nn.Module):
    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1))
        self.head = nn.Linear(8, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).relu()
        x = (x + self.block(x)).relu()
        return self.head(x.mean((2, 3)))


class Diverging(TinyNet):
    """Its logits are NaN from the third training batch on."""

    calls: torch.Tensor

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__(num_classes)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = super().forward(x)
        if self.training:
            self.calls.add_(1)
        return logits * torch.where(self.calls > 2, torch.nan, 1.0)


class Plain(nn.Module):
    """No batch norm: what a process computes does not depend on who else is in its batch."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1))
        self.head = nn.Linear(8, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).relu()
        x = (x + self.block(x)).relu()
        return self.head(x.mean((2, 3)))


class Spoilt(Plain):
    """The gradient of its head is NaN in the sixth training batch, of which its loss shows nothing."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__(num_classes)
        self.calls = 0
        self.head.weight.register_hook(self._spoil)

    def _spoil(self, gradient: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return gradient * (float("nan") if self.calls == 6 else 1.0)


def net(num_classes: int) -> TinyNet:
    return TinyNet(num_classes)


def diverging(num_classes: int) -> Diverging:
    return Diverging(num_classes)


def plain(num_classes: int) -> Plain:
    return Plain(num_classes)


def spoilt(num_classes: int) -> Spoilt:
    return Spoilt(num_classes)


def nothing() -> None:
    return None
