"""The running copy as a chain of segments: where it is cut, and that it gives the same numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Node

from fractrain_fx import FracModel, RunConfig
from fractrain_fx.capture.compare import difference
from fractrain_fx.config.run import Skipping
from fractrain_fx.passes import facts
from fractrain_fx.passes.execute.segments import Segment, chain
from tests.build import objective, paper
from tests.build import rewritten as build_rewritten
from tests.models import build
from tests.segmented import IMAGES, ROWS, Residual, Stack, rewritten


def segments(model: FracModel, training: bool = True) -> list[Segment]:
    return model._state.running[training].segments()


def own_nodes(segment: Segment) -> list[Node]:
    return [node for node in segment.module.graph.nodes if node.op != "placeholder"]


def run(model: FracModel, values: tuple[Any, ...], training: bool, *, whole: bool) -> dict[str, Any]:
    """Output, cost, gradients and buffers of a copy after one call."""
    twin = copy.deepcopy(model).train(training)
    running = twin._state.running[training]
    graph = running.current()
    torch.manual_seed(5)
    made = (graph if whole else chain(graph, running.segments(), lambda each: each.module))(*values)
    if training:
        (objective(made[0]) + made[1].cp).backward()
    gradients = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
    return {"made": made, "gradients": gradients, "buffers": dict(twin.named_buffers())}


def assert_equal_to_whole(model: FracModel, values: tuple[Any, ...]) -> None:
    model.train()(*model._state.recording.args, **model._state.recording.kwargs)  # ranges, for evaluation
    for training in (True, False):
        assert len(segments(model, training)) > 1
        cut, whole = (run(model, values, training, whole=each) for each in (False, True))
        assert difference(cut, whole) is None


@pytest.mark.parametrize("skipping", ["computed", "left-out"])
def test_segments_give_the_numbers_of_the_whole(skipping: Skipping) -> None:
    assert_equal_to_whole(
        rewritten(Residual(), IMAGES, run=RunConfig(skipping=skipping), options=("FW-0/BW-0", "FW-4/BW-8")), (IMAGES,)
    )


@pytest.mark.long
@pytest.mark.parametrize("method", [pytest.param("float", marks=pytest.mark.slow), "fractrain"])
@pytest.mark.parametrize(
    "name",
    ["resnet18", "vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "gpt2", "llama", "t5", "mixtral"],
)
def test_segments_of_real_models_give_the_numbers_of_the_whole(name: str, method: str) -> None:
    case = build(name)
    model = build_rewritten(case, config=paper(method))
    assert_equal_to_whole(model, model._state.recording.call.bind(case.args, case.keywords))


def test_gates_are_segments_of_their_own_and_blocks_end_behind_in_place_ops() -> None:
    model = rewritten(Residual(), IMAGES)
    parts = segments(model)
    gates = [each for each in parts if "choose" in (each.once or "")]
    assert sum(facts(node).role == "choice" for each in gates for node in own_nodes(each)) == 3
    assert not any(facts(node).role == "choice" for each in parts if each not in gates for node in own_nodes(each))
    for each in parts:
        calls = [str(node.target) for node in each.module.graph.find_nodes(op="call_module")]
        # The ReLU writes into the sum, so both are in one segment.
        assert sum("act" in call for call in calls) == sum("norm" in call for call in calls) <= 1


def test_every_contraction_is_in_one_segment_and_weights_are_read_where_they_are_used() -> None:
    model = rewritten(Residual(), IMAGES, "static")
    parts = segments(model)
    assert [name for each in parts for name in each.ops] == [op.name for op in model.ops]
    assert not any(node.op == "get_attr" for each in parts for node in each.inputs)
    assert all(each.module._modules is model._modules for each in parts)


def test_a_model_without_residual_blocks_is_cut_after_its_repeated_module() -> None:
    parts = segments(rewritten(Stack(), ROWS, "float"))
    assert [each.ops for each in parts] == [(f"{n}.0", f"{n}.2") for n in range(4)] + [("4",)]
    assert len(segments(rewritten(nn.Linear(8, 2), ROWS, "float"))) == 1
    # The next segment reads the output of each of these layers, and does not count it as its own.
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    assert [each.ops for each in segments(rewritten(plain, ROWS, "float"))] == [("0",), ("1",), ("2",)]
