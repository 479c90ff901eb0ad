"""Small models of several segments, and how tests of segments rewrite them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fractrain_fx import FracModel
from tests import build

__all__ = ["IMAGES", "ROWS", "Residual", "Stack", "rewritten"]


class Residual(nn.Module):
    """Blocks with batch norm, dropout and in-place ReLUs behind the residual add."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        self.act, self.head = nn.ReLU(inplace=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu_()
        for conv, norm in zip(self.blocks, self.norms, strict=True):
            x = self.act(x + nn.functional.dropout(norm(conv(x)), 0.2, self.training))
        return self.head(x.mean((2, 3)))


class Stack(nn.Sequential):
    """Four layers of one class, none of them residual, and a head."""

    class Layer(nn.Sequential):
        pass

    def __init__(self) -> None:
        layers = [self.Layer(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
        super().__init__(*layers, nn.Linear(8, 2))


IMAGES, ROWS = torch.linspace(-1, 1, 4 * 3 * 8 * 8).reshape(4, 3, 8, 8), torch.linspace(-1, 1, 24).reshape(3, 8)


def rewritten(model: nn.Module, x: Tensor, method: str = "fractrain", **changes: Any) -> FracModel:
    """The model on a batch, with the paper's settings: its gates skip blocks."""
    return build.rewritten(model, x, config=build.paper(method, **changes))
