"""Parts of the original whose names are properties of the rewritten model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import Engine, FracConfig, FracModel, Pin, fractrainify
from fractrain_fx.passes import Block
from tests import build


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


@pytest.mark.parametrize("precision", ["4/8", None])
def test_a_model_in_evaluation_mode_is_rewritten_to_one_in_evaluation_mode(precision: str | None) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    config = FracConfig(method="static", precision=precision) if precision else FracConfig(method="float")
    model = build.rewritten(net, torch.randn(8, 4), config=config)
    assert not model.training and not any(module.training for module in model.modules())
    x = torch.randn(6, 4)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert torch.equal(model(x)[:2], model(x[:2]))
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())


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


def layers(**config: Any) -> FracModel:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    return build.rewritten(net, torch.randn(3, 4), **config)


def test_stage_and_ops_print_what_they_are_now() -> None:
    model = layers(method="pfq", stages="FW(3,4,6,8)/BW(6,6,8,8)", pins=(Pin("4", "FW-8/BW-16"),))
    assert str(model.stage) == "1 of 4, FW-3/BW-6"
    engine = Engine(model, epochs=2)
    for _ in range(2):
        engine.loss(model(torch.randn(3, 4)).square().mean()).backward()
        engine.end_epoch()
    assert str(model.stage) == "4 of 4, FW-8/BW-8"
    assert [str(op.precision) for op in model.ops] == ["float", "FW-8/BW-8", "FW-8/BW-16 (pinned)", "float"]
    assert model.ops[1].precision.words == "scheduled: stage precision"
    model.set_precision("FW-5/BW-5")
    assert str(model.ops[1].precision) == "FW-5/BW-5"
    assert layers(method="pfq").stage is not None and copy.deepcopy(model).stage is None  # bits of no stage


def test_gated_ops_print_the_options_and_the_stage_of_their_engine() -> None:
    model = layers(targets=(2.5, 3.0), options=("3/6", "6/8"))
    assert str(model.ops[1].precision) == "FW-3/BW-6 to FW-6/BW-8 (by gate)" and model.stage is None
    Engine(model, epochs=1)
    assert str(model.stage) == "2 of 2, cp 3.00 %"
