"""Skips behind a batch norm are one op with it in the copy that runs, which keeps less and gives the same numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fractrain_fx import FracConfig, FracModel, RunConfig, fractrainify
from fractrain_fx.execution.blocks.skipped_norm import SkippedNorm
from fractrain_fx.passes import facts
from fractrain_fx.zoo.models import resnet20
from tests.build import paper, rewritten


@pytest.fixture(scope="module")
def model() -> FracModel:
    torch.manual_seed(0)
    return rewritten(resnet20(), torch.randn(2, 3, 32, 32), config=paper("dfq"))


def test_every_skip_of_a_resnet_is_fused_and_stays_shown(model: FracModel) -> None:
    running = model._state.running[True].current()
    modules = [running.get_submodule(str(n.target)) for n in running.graph.nodes if facts(n).role == "skip"]
    assert len(modules) == 9 and all(isinstance(module, SkippedNorm) for module in modules)
    assert sum(facts(node).role == "skip" for node in model.graph.nodes) == 9
    assert not any(isinstance(module, SkippedNorm) for module in map(model.get_submodule, _called(model)))


def _called(model: FracModel) -> list[str]:
    return [str(node.target) for node in model.graph.nodes if node.op == "call_module"]


@pytest.mark.parametrize("training", [True, False])
def test_the_numbers_are_those_of_the_graph_shown(training: bool) -> None:
    # Without rounding, whose noise would answer to the last bit of a gate's gradient, and with one order of sums.
    config = FracConfig(method="slu", run=RunConfig(memory_format="preserve"))
    model = fractrainify(resnet20(), config=config, example_inputs=(torch.randn(2, 3, 32, 32),), check=False)
    x = torch.randn(6, 3, 32, 32)
    model.train()(x)
    results = []
    for shown in (True, False):
        twin = copy.deepcopy(model).train(training)
        out, cost = twin.graph_module(x) if shown else (twin(x), twin.cost)
        for choice in cost.choice.values():
            choice.retain_grad()
        out.square().sum().backward()
        found = {name: p.grad for name, p in twin.named_parameters()}
        found |= {name: choice.grad for name, choice in cost.choice.items()}
        results.append((out.detach(), found, dict(twin.named_buffers())))
    (out, found, buffers), (other, others, other_buffers) = results
    assert torch.equal(out, other)
    assert all(torch.equal(buffers[name], other_buffers[name]) for name in buffers)
    for name, gradient in found.items():
        assert gradient is not None
        # The gradient of a choice is the same sum in another order, and every layer before sees it.
        torch.testing.assert_close(others[name], gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()))


def test_what_a_gated_resnet_keeps_is_little_more_than_what_it_keeps_in_float(model: FracModel) -> None:
    x = torch.randn(8, 3, 32, 32)
    plain = resnet20()
    assert kept(model, x) < 1.1 * kept(plain, x)


def kept(model: nn.Module, x: Tensor) -> int:
    storages: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return saved

    with saved_tensors_hooks(pack, lambda saved: saved):
        model.train()(x).sum().backward()
    return sum(storages.values())


class _Doubled(nn.BatchNorm2d):
    """Takes over the tensors of a norm, as a synchronised one does."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__(norm.num_features)
        self._parameters, self._buffers = norm._parameters, norm._buffers

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_a_norm_that_was_replaced_takes_effect() -> None:
    model = fractrainify(
        resnet20(), config=FracConfig(method="slu"), example_inputs=(torch.randn(2, 3, 32, 32),), check=False
    )
    x = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        before = model(x)
        for stage in (model.layer1, model.layer2, model.layer3):
            for block in stage:
                block.bn2 = _Doubled(block.bn2)  # with other tensors it would be another structure
        assert not torch.equal(model(x), before)
