"""A recording that was rewritten is one frozen value, and a model is made from it alone."""

from __future__ import annotations

import copy
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import FracConfig, FracModel, fractrainify
from fractrain_fx.errors import CaptureError, ConfigError
from fractrain_fx.passes import default_passes
from fractrain_fx.rewriting import record_model, rewrite
from tests.models import build


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


class Keeps(nn.Linear):
    """Returns the mean over the outputs of all calls."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(super().forward(x))
        return torch.stack(self.kept).mean(0)


def test_a_pass_that_fails_names_the_parts_that_stay_one_node() -> None:
    net = nn.Sequential(nn.Linear(4, 4), Keeps(4), nn.Linear(4, 4))
    with pytest.raises(CaptureError, match=r"module '1' \(Keeps\).* its forward changes 1.kept .*test_rewriting"):
        fractrainify(net, config=FracConfig(method="static"), example_inputs=(torch.randn(2, 4),))


def test_a_model_is_made_from_the_rewritten_recording_alone() -> None:
    case, config = build("tied_weights"), FracConfig()
    rewritten = rewrite(case.model, record_model(case.model, config, case.args), config)
    assert rewritten.original is case.model and rewritten.chain is None and rewritten.reach is not None
    with pytest.raises(FrozenInstanceError):
        rewritten.targets = ()  # type: ignore[misc]
    model, usual = FracModel(rewritten), fractrainify(build("tied_weights").model, example_inputs=case.args)
    assert model.targets == rewritten.targets == usual.targets != ()
    assert copy.deepcopy(model).targets == model.targets
    assert [str(op) for op in model.ops] == [str(op) for op in usual.ops]


def test_a_chain_of_ones_own_is_kept_with_the_recording() -> None:
    config, model = FracConfig(method="static"), small()
    chain = default_passes(config)
    rewritten = rewrite(model, record_model(model, config, (torch.randn(2, 4),)), config, chain)
    assert rewritten.chain == tuple(chain) and rewritten.targets == () and rewritten.reach is None


def test_a_saved_model_is_rebuilt_in_the_class_that_was_asked(tmp_path: Path) -> None:
    class Mine(FracModel):
        """A face with something of its own."""

    x = torch.randn(2, 4)
    saved = fractrainify(small(), config=FracConfig(method="static"), example_inputs=(x,))
    saved.save_pretrained(tmp_path)
    rebuilt = Mine.from_pretrained(tmp_path, model=small())
    assert type(rebuilt) is Mine and type(copy.deepcopy(rebuilt)) is Mine
    assert all(torch.equal(rebuilt.state_dict()[name], value) for name, value in saved.state_dict().items())
    with pytest.raises(ConfigError, match="restore"):
        record_model(rebuilt, FracConfig(), (x,))
