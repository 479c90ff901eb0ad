"""Code may view the result of an op as other shapes, so each op's result lies in memory as in the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fractrain_fx import FracConfig, fractrainify


class Attention(nn.Module):
    """The fused op gives its result in the order of its query, so that heads and width lie side by side."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = x.view(batch, length, 2, width // 2).transpose(1, 2)
        mixed = F.dropout(F.scaled_dot_product_attention(heads, heads, heads), 0.0)
        return mixed.transpose(1, 2).view(batch, length, width)


class Products(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(*x.shape[:2], 2, 4)
        return torch.einsum("bqhd,bkhd->bqhk", heads, heads).transpose(1, 2).contiguous().view(*x.shape[:2], -1)


class OfView(nn.Module):
    """A convolution of images whose channels are innermost gives such images."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.convolution = kind(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x.movedim(-1, 1)).movedim(1, -1).view(len(x), -1, 8)


@pytest.mark.parametrize("method", ["static", "fractrain"])
@pytest.mark.parametrize(
    ("middle", "size"),
    [
        (Attention(), (6,)),
        (Products(), (6,)),
        (OfView(nn.Conv2d), (6, 5)),
        (OfView(nn.ConvTranspose2d), (6, 5)),
        (OfView(nn.Conv3d), (6, 5, 4)),
        (OfView(nn.ConvTranspose3d), (6, 5, 4)),
    ],
    ids=["attention", "einsum", "conv2d", "conv_transpose2d", "conv3d", "conv_transpose3d"],
)
def test_results_can_be_viewed_as_in_the_model(middle: nn.Module, size: tuple[int, ...], method: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), middle, nn.LazyLinear(4))
    x = torch.randn(2, *size, 8)
    model(x)
    rewritten = fractrainify(model, config=FracConfig(method=method), example_inputs=(x,))
    for mode in (True, False):
        rewritten.train(mode)
        again = torch.randn(3, *size, 8)
        assert rewritten(again).shape == model(again).shape
        rewritten.graph_module(again)
