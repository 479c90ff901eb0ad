"""Runs that are compiled as CUDA graphs by themselves, and gradients that no graph overwrites."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx.training import TrainSettings, build_trainer
from fractrain_fx.training.graphs import LONG_RUN, OwnGradients, mode_of_run
from tests.training.runs import quiet, settings, weights

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(
    ("given", "device", "batches", "mode"),
    [
        ({}, CUDA, LONG_RUN, "reduce-overhead"),
        ({"accumulate": 4}, CUDA, LONG_RUN, "reduce-overhead"),
        ({"mixed_precision": "bf16"}, CUDA, LONG_RUN, "reduce-overhead"),
        ({}, CUDA, LONG_RUN - 1, None),
        ({}, CPU, LONG_RUN, None),
        ({"compile": False}, CUDA, LONG_RUN, None),
        ({"compile": True}, CUDA, 1, "default"),
        ({"compile": True, "compile_mode": "max-autotune"}, CPU, 1, "max-autotune"),
        ({"mixed_precision": "fp16"}, CUDA, LONG_RUN, None),
        ({"checkpointing": True}, CUDA, LONG_RUN, None),
        ({"compile_segments": True}, CUDA, LONG_RUN, None),
        ({"shard": True}, CUDA, LONG_RUN, None),
    ],
)
def test_long_runs_on_a_gpu_become_cuda_graphs(
    given: dict[str, Any], device: torch.device, batches: int, mode: str | None
) -> None:
    assert mode_of_run(TrainSettings(**given), device, batches) == mode


class _Replayed(torch.autograd.Function):
    """Multiplies by a weight; backward writes the weight's gradient where it wrote the one before, as a graph does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, memory: Tensor) -> Tensor:
        ctx.x, ctx.memory = x, memory
        return x * w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.memory.copy_((grads[0] * ctx.x).sum(0))
        return None, ctx.memory.detach(), None


def test_gradients_of_several_batches_add_up_though_the_same_memory_is_written() -> None:
    w, memory = nn.Parameter(torch.ones(3)), torch.zeros(3)
    batches = [torch.full((2, 3), float(value)) for value in (1, 10, 100)]

    def summed(own: OwnGradients | None) -> list[float]:
        w.grad = None
        for x in batches:
            _Replayed.apply(x, w, memory).sum().backward()
            if own is not None:
                own.take()
        assert w.grad is not None
        return w.grad.tolist()

    assert summed(None) != [222.0] * 3  # the control: without it the memory is overwritten
    own = OwnGradients([w])
    assert summed(own) == summed(own) == [222.0] * 3


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    own = OwnGradients([first, second])
    (first * 2).sum().backward()
    own.take()
    (first * 2 + second).sum().backward()
    own.take()
    assert first.grad is not None and first.grad.tolist() == [4.0, 4.0]
    assert second.grad is not None and second.grad.tolist() == [1.0, 1.0]


def test_a_run_in_graphs_accumulates_as_an_eager_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile(model: nn.Module, mode: str) -> nn.Module:
        """The model, whose gradients are lost when it runs again."""
        lent: list[Tensor] = []

        def lose(*_: Any) -> None:
            for each in lent:
                each.fill_(float("nan"))
            lent.clear()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: lent.append(p.grad))
        model.register_forward_pre_hook(lose)
        return model

    monkeypatch.setattr(torch, "compile", compile)
    found = []
    in_graphs: dict[str, Any] = {"compile": True, "compile_mode": "reduce-overhead"}
    for given in ({}, in_graphs):
        trainer = build_trainer(settings("pfq", epochs=1, accumulate=2, **given), console=quiet())
        trainer.fit()
        found.append(weights(trainer))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
