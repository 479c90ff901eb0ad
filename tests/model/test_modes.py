"""Parts of a model may be in another mode than the model."""

from __future__ import annotations

import copy
from typing import Self

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import FracConfig, FracModel, fractrainify

FLOAT = FracConfig(method="float")


def pair(net: nn.Module, *inputs: Tensor) -> tuple[nn.Module, FracModel]:
    """A copy of a model, and the model rewritten."""
    return copy.deepcopy(net), fractrainify(net, config=FLOAT, example_inputs=inputs)


class Frozen(nn.Module):
    """Keeps its batch norm in eval mode, as backbones of detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_models_own_train_method_is_followed(wrapped: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    reference, model = pair(nn.Sequential(Frozen(), nn.Linear(4, 2)) if wrapped else Frozen(), x)
    for mode in (True, False, True):
        outputs = [each.train(mode)(x) for each in (reference, model)]
        assert torch.equal(*outputs)
    assert all(torch.equal(x, model.get_buffer(name)) for name, x in reference.named_buffers())
