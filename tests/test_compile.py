"""Precision is data: a rewritten model compiles whole, and a new precision or stage compiles nothing anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.exc import TorchRuntimeError
from torch._dynamo.testing import CompileCounterWithBackend

from fractrain_fx import AffineConfig, Engine, FracConfig, FracModel, GateConfig, Precision, RunConfig, fractrainify
from fractrain_fx.config.run import Backend
from tests.build import objective, paper, rewritten
from tests.models import COMPILES_EXPERTS, HOME_MADE, HUGGING_FACE, TIMM, build

pytestmark = pytest.mark.long


def small(method: str, backend: Backend = "plain") -> tuple[FracModel, torch.Tensor]:
    case = build("multihead_attention")
    return rewritten(case, config=paper(method, run=RunConfig(backend=backend))), torch.randn(4, 5, 12)


def _marks(name: str) -> list[pytest.MarkDecorator]:
    refused = name == "mixtral" and not COMPILES_EXPERTS
    return [pytest.mark.xfail(strict=True, raises=TorchRuntimeError)] if refused else []


def test_a_new_precision_recompiles_nothing_and_changes_the_result() -> None:
    model, x = small("pfq")
    counter = CompileCounterWithBackend("aot_eager")
    compiled: Any = torch.compile(model, fullgraph=True, backend=counter)
    outputs = []
    for precision in (Precision(8, 8), Precision(3, 6), Precision(32, 32)):
        model.set_precision(precision)
        output = compiled(x)
        output.sum().backward()
        outputs.append(output.detach())
    assert counter.frame_count == 1
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[1], outputs[2])


@pytest.mark.parametrize(
    "method, backend",
    [
        *[("float", "plain"), ("dfq", "plain")],
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("dfq", "cpu"), ("static", "plain"), ("static", "cpu"))
        ),
    ],
)
def test_train_and_eval_compile_without_a_graph_break_and_agree_with_eager(method: str, backend: Backend) -> None:
    model, x = small(method, backend)
    counter = CompileCounterWithBackend("aot_eager")
    compiled: Any = torch.compile(model, fullgraph=True, backend=counter)
    engine = Engine(compiled)
    for _ in range(3):
        engine.loss(compiled(x).square().mean()).backward()
        engine.end_epoch()
    assert counter.frame_count == 1
    assert 0 <= float(model.cost.cp.detach()) <= 1
    compiled.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    assert counter.frame_count == 2


def test_a_compiled_graph_with_a_multiplier_and_a_grid_with_zero_compiles_once_for_all_stages() -> None:
    case = build("multihead_attention")
    config = FracConfig(
        run=RunConfig(length=4),
        affine=AffineConfig(gradient_grid="zero"),
        gate=GateConfig(control="multiplier"),
        schedule="manual",
    )
    model, x = fractrainify(case.model, config=config, example_inputs=case.args, check=False), torch.randn(4, 5, 12)
    counter = CompileCounterWithBackend("aot_eager")
    compiled: Any = torch.compile(model, fullgraph=True, backend=counter)
    engine = Engine(compiled)
    for _ in range(4):
        engine.loss(compiled(x).square().mean()).backward()
        engine.end_epoch()
    assert counter.frame_count == 1 and len(engine.ledger.turning_points) == 3
    assert engine.state_dict()["cost_term"]["integral"] != 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=_marks(n)) for n in (*HOME_MADE, *HUGGING_FACE, *TIMM)])
def test_every_model_compiles_whole_and_a_new_precision_recompiles_nothing(name: str) -> None:
    case = build(name)
    model = rewritten(case, method="pfq", check=True)
    counter = CompileCounterWithBackend("eager")
    compiled: Any = torch.compile(model, fullgraph=True, backend=counter)
    for precision in (Precision(8, 8), Precision(3, 6)):
        model.set_precision(precision)
        objective(compiled(*case.args, **case.keywords)).backward()
    assert counter.frame_count == 1
