"""Parts of the original whose names are properties of the rewritten model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import FracConfig, fractrainify
from fractrain_fx.passes import Block


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.ops, self.batch = nn.Linear(4, 4), nn.Linear(4, 4)
        self.cost = nn.Parameter(torch.ones(4))
        self.register_buffer("macs", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).relu()
        return self.batch(self.ops(x)) * self.cost * self.macs


def test_parts_of_the_original_are_reached_by_name_although_properties_hide_them() -> None:
    original = Named()
    model = fractrainify(original, config=FracConfig(method="float"), example_inputs=(torch.randn(2, 4),))
    for path in ("blocks", "blocks.0", "ops", "batch"):
        assert model.get_submodule(path) is original.get_submodule(path)
    assert model.get_parameter("cost") is original.cost and model.get_buffer("macs") is original.macs
    assert model.get_parameter("blocks.0.weight") is original.blocks[0].weight
    assert model.get_submodule("") is model
    with pytest.raises(AttributeError, match="nothing"):
        model.get_submodule("nothing")


def test_a_list_that_hides_a_part_says_how_to_reach_it() -> None:
    model = fractrainify(Named(), config=FracConfig(method="float"), example_inputs=(torch.randn(2, 4),))
    assert isinstance(model.blocks, list) and all(isinstance(block, Block) for block in model.blocks)
    assert copy.deepcopy(model.ops) == model.ops
    with pytest.raises(AttributeError, match=r'no \'requires_grad_\': .* model\.get_submodule\("blocks"\)'):
        model.blocks.requires_grad_(False)  # type: ignore[attr-defined]
