"""The three chains, and passes that refuse a graph that is not ready for them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.passes.infra.pass_base import PassBase

from fractrain_fx import FracConfig, FracModel, RunConfig, fractrainify
from fractrain_fx.capture import RecordedModule
from fractrain_fx.errors import ModelError, PassError
from fractrain_fx.passes import Fuse, FuseSkips, Quantize, default_passes, execution_passes, fused_ops
from fractrain_fx.passes.graph.run import run_passes
from tests.build import paper, rewritten
from tests.residual import Residual

LAST = "RemakeOperands FuseSkips"


def residual_net(**options: Any) -> FracModel:
    return rewritten(Residual(), torch.randn(4, 6), config=paper(**options))


def names(passes: list[PassBase]) -> list[str]:
    return [type(each).__name__ for each in passes]


def copied(model: FracModel) -> RecordedModule:
    shown = model.graph_module
    return RecordedModule.over(shown, shown._modules, copy.deepcopy(shown.graph))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"method": "float"}, "Fuse ReplaceReLUs ChannelsLast ChooseBackend " + LAST),
        ({"method": "fractrain"}, "Fuse ReplaceReLUs ChannelsLast ChooseBackend " + LAST),
        (
            {"method": "fractrain", "run": RunConfig(skipping="left-out")},
            "Fuse ReplaceReLUs ChannelsLast ChooseBackend Dispatch " + LAST,
        ),
        ({"method": "static", "run": RunConfig(memory_format="preserve")}, "Fuse ReplaceReLUs ChooseBackend " + LAST),
        (
            {"method": "static", "format": "fp8", "run": RunConfig(torchao=True)},
            "Fuse ReplaceReLUs ChannelsLast ChooseBackend " + LAST,
        ),
    ],
)
def test_a_configuration_says_what_makes_the_copy_that_runs(options: dict[str, Any], expected: str) -> None:
    assert " ".join(names(execution_passes(paper(**options)))) == expected


def test_the_chain_gives_the_copy_that_runs() -> None:
    model = residual_net(run=RunConfig(backend="codes", skipping="left-out"))
    made = copied(model)
    run_passes(made, execution_passes(model.frac_config))
    running = model._state.running[True]
    assert [(node.op, node.name) for node in made.graph.nodes] == [
        (node.op, node.name) for node in running.current().graph.nodes
    ]
    assert fused_ops(made).keys() == running.fused.keys() and running.fused


@pytest.mark.parametrize(
    "config",
    [
        FracConfig(method="static", run=RunConfig(backend="codes")),
        FracConfig(method="static", format="fp8", run=RunConfig(torchao=True)),
    ],
    ids=["codes", "torchao"],
)
def test_other_forms_of_fused_ops_are_refused_before_there_are_any(config: FracConfig) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    shown = copied(
        fractrainify(net, config=FracConfig(method="static"), example_inputs=(torch.randn(2, 4),), check=False)
    )
    apart = [each for each in execution_passes(config) if not isinstance(each, Fuse)]
    with pytest.raises(PassError, match="run Fuse first"):
        run_passes(shown, apart)


def test_what_is_not_a_graph_of_gates_is_refused() -> None:
    graph = copied(residual_net())
    (skip, *_) = (node for node in graph.graph.nodes if "skip" in node.name and node.op == "call_module")
    skip.args = skip.args[:1]
    with pytest.raises(PassError, match="not a branch and a choice"):
        FuseSkips().requires(graph)


def test_a_cost_of_ops_that_nothing_rounds_is_refused() -> None:
    config = FracConfig(method="static")
    chain = [each for each in default_passes(config) if not isinstance(each, Quantize)]
    with pytest.raises(PassError, match="is scheduled but nothing rounds it: run Quantize first"):
        fractrainify(Residual(), config=config, example_inputs=(torch.randn(4, 6),), check=False, passes=chain)


def test_a_chain_raises_the_error_of_its_pass() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(ModelError, match="attention='float' would change nothing"):
        fractrainify(net, config=FracConfig(attention="float"), example_inputs=(torch.randn(2, 4),), check=False)
