"""One sample without a batch dimension: vectors in linear layers, and maps in convolutions, in every format."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import AffineConfig, FracConfig, fractrainify
from tests.build import rewritten as build_rewritten
from tests.models import thinned

CONFIGS = [
    FracConfig(method="static", precision="8/8"),
    FracConfig(method="static", precision="8/8", affine=AffineConfig(ranges="row")),
    FracConfig(method="static", precision="8/8", affine=AffineConfig(ranges="head")),
    FracConfig(method="static", precision="8/8", format="dorefa"),
    FracConfig(method="static", precision="8/8", format="wageubn"),
    FracConfig(method="static", precision="8/8", format="mx"),
    FracConfig(method="static", precision="8/8", format="fp8"),
    FracConfig(method="static", precision="8/8", format="int"),
    FracConfig(method="static", precision="8/8", format="int", recipe="jetfire"),
    FracConfig(method="static", precision="4/4", format="nvfp4"),
]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)).relu())


class Maps(nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 8, 3, padding=1)
        self.middle = nn.Conv2d(8, 8, 3, padding=1, groups=groups)
        self.last = nn.ConvTranspose2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)).relu())


def step(model: nn.Module, config: FracConfig, x: Tensor) -> tuple[Tensor, Tensor]:
    """Output and the gradient of the middle layer's weight in training."""
    rewritten = build_rewritten(copy.deepcopy(model), x, config=config, check=True).train()
    torch.manual_seed(1)
    output = rewritten(x)
    output.square().sum().backward()
    gradient = rewritten.get_parameter("middle.weight").grad
    assert gradient is not None
    return output, gradient


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_vector_is_rounded_as_a_batch_of_one_and_its_gradient_is_near(config: FracConfig) -> None:
    model, x = Layers(), torch.randn(16)
    alone, batch = step(model, config, x), step(model, config, x[None])
    # torch multiplies a vector by another kernel, which adds up in another order.
    torch.testing.assert_close(alone[0], batch[0][0], rtol=1e-4, atol=1e-5)
    # Gradients are rounded by chance, in blocks that lie otherwise: 4 bits change an element by up to a third.
    away = (alone[1] - batch[1]).norm() / batch[1].norm()
    assert away < (0.5 if config.format == "nvfp4" else 0.1)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("config", thinned(CONFIGS, 3), ids=str)
def test_a_map_without_a_batch_dimension_is_a_batch_of_one(config: FracConfig, groups: int) -> None:
    model, x = Maps(groups), torch.randn(8, 2, 2)  # shorter than the channels of a group
    alone, batch = step(model, config, x), step(model, config, x[None])
    # On some processors torch adds up a map alone in another order.
    torch.testing.assert_close(alone[0], batch[0][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(alone[1], batch[1], rtol=1e-5, atol=1e-5)


def test_float_equals_the_model() -> None:
    for model, x in ((Layers(), torch.randn(16)), (Maps(1), torch.randn(8, 2, 2))):
        rewritten = fractrainify(model, config=FracConfig(method="float"), example_inputs=(x,))
        assert torch.equal(rewritten(x), model(x))
