"""Backward passes that round nothing that the forward pass has not rounded."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from fractrain_fx import FracConfig, fractrainify
from fractrain_fx.formats.microscaling import fake_quantize
from fractrain_fx.nn.rounding import unrounded_gradients


def test_backward_without_rounding_multiplies_what_the_forward_pass_rounded() -> None:
    first, middle, last = (nn.Linear(64, 64) for _ in range(3))
    layers = nn.Sequential(first, middle, last)
    x = torch.randn(8, 64)
    config = FracConfig(method="static", precision="FW-4/BW-4", format="mx")
    model = fractrainify(layers, config=config, example_inputs=(x,), check=False)
    with unrounded_gradients():
        model(x).square().sum().backward()
    found = [each.grad for each in layers.parameters()]
    layers.zero_grad()
    rounded = fake_quantize(first(x), "e2m1"), fake_quantize(middle.weight, "e2m1")
    last(F.linear(*rounded, middle.bias)).square().sum().backward()
    torch.testing.assert_close(found, [each.grad for each in layers.parameters()])
