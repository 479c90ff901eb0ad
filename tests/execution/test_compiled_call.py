"""Codes inside compiled graphs: what eager mode gives, by ops that the graph does not look into."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx import GraphModule
from torch.nn import functional as F

from fractrain_fx import FracModel, Precision, RunConfig
from fractrain_fx.execution.fused_op import FusedOp
from fractrain_fx.execution.plan import Call, Rounds
from fractrain_fx.formats import ValueRange
from fractrain_fx.passes import fused_ops
from tests.build import rewritten
from tests.products import needs_kernels

pytestmark = [pytest.mark.long, needs_kernels]


class Net(nn.Module):
    """A stem, two residual blocks with a 1x1 convolution each, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 1), nn.Linear(16, 5)
        self.up = nn.ModuleList(nn.Conv2d(16, 32, 1) for _ in range(2))
        self.down = nn.ModuleList(nn.Conv2d(32, 16, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.relu(up(x)))
        return self.head(x.mean((2, 3)))


def lowered(method: str = "pfq", **words: Any) -> FracModel:
    torch.manual_seed(0)
    return rewritten(Net(), images(2), method=method, run=RunConfig(backend="codes-always"), **words).train()


def images(batch: int = 6) -> Tensor:
    return torch.randn(batch, 3, 4, 4, generator=torch.Generator().manual_seed(1))


def compiled(model: FracModel) -> tuple[Callable[..., Tensor], CompileCounterWithBackend]:
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(model, fullgraph=True, backend=counter), counter


def gradients(model: FracModel, call: Callable[..., Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Of a step whose noise is fixed."""
    model.zero_grad()
    torch.manual_seed(2)
    out = call(images())
    loss = out.square().mean()
    (loss + model.cost.cp if model.frac_config.gated else loss).backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_alike(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    largest = max(float(each.norm()) for each in wanted.values())
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 1e-4 * largest, name


def counted(graphs: CompileCounterWithBackend, name: str) -> int:
    parts = [part for graph in graphs.graphs for part in graph.modules() if isinstance(part, GraphModule)]
    return sum(str(node.target).startswith(name) for part in parts for node in part.graph.nodes)


@pytest.mark.parametrize("method", ["pfq", "dfq", pytest.param("static", marks=pytest.mark.slow)])
def test_a_compiled_step_multiplies_codes_and_gives_the_numbers_of_the_eager_one(method: str) -> None:
    # 16 backward bits, so that a noise that moves a value by a level hardly shows.
    words: dict[str, Any] = {"precision": Precision(8, 16)} if method == "static" else {}
    if method == "dfq":
        words = {"options": ("4/16", "6/16", "8/16")}
    eager = lowered(method, **words)
    if method == "pfq":
        eager.set_precision(Precision(6, 16))
    model = copy.deepcopy(eager)
    call, graphs = compiled(model)
    out, found = gradients(model, call)
    wanted_out, wanted = gradients(eager, eager)
    torch.testing.assert_close(out, wanted_out, rtol=1e-5, atol=1e-6)
    assert_alike(found, wanted)
    assert set(model.kernels().values()) == {"int8"}
    assert graphs.frame_count == 1 and counted(graphs, "fractrain_fx.forward_of") == 4


def test_a_new_precision_compiles_nothing_anew_whether_it_has_codes_or_not() -> None:
    eager = lowered()
    model = copy.deepcopy(eager)
    call, graphs = compiled(model)
    for precision in (Precision(3, 16), Precision(8, 16), Precision(16, 16), Precision(32, 32)):
        for each in (eager, model):
            each.set_precision(precision)
        out, found = gradients(model, call)
        wanted_out, wanted = gradients(eager, eager)
        torch.testing.assert_close(out, wanted_out, rtol=1e-5, atol=1e-6)
        assert_alike(found, wanted)
        assert model.kernels() == eager.kernels()
    assert graphs.frame_count == 1


def test_evaluation_is_that_of_eager_mode() -> None:
    model = lowered()
    model(images())
    call, graphs = compiled(model.eval())
    with torch.no_grad():
        torch.testing.assert_close(call(images()), model(images()))
    assert counted(graphs, "fractrain_fx.forward_of") == 4
    torch.testing.assert_close(call(images()), model(images()))  # with gradients, in float
    assert counted(graphs, "fractrain_fx.forward_of") == 4


def test_under_autocast_a_compiled_step_is_simulated() -> None:
    model = lowered()
    call, graphs = compiled(model)
    with torch.autocast("cpu", torch.bfloat16):
        out = call(images())
    assert out.isfinite().all() and counted(graphs, "fractrain_fx.forward_of") == 0


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_is_an_op_of_its_own_and_outlives_the_first(way: str) -> None:
    model = lowered()
    op = next(iter(fused_ops(model._state.running[True].current()).values()))
    twin: FusedOp = copy.deepcopy(op) if way == "deepcopy" else pickle.loads(pickle.dumps(op))
    assert twin._number != op._number
    other = copy.deepcopy(model)
    out, _ = gradients(model, model)
    del model, op
    gc.collect()
    found, _ = gradients(other, compiled(other)[0])
    torch.testing.assert_close(found, out, rtol=1e-5, atol=1e-6)


def test_the_ops_say_of_themselves_what_torch_has_to_know() -> None:
    model = lowered()
    op = next(iter(fused_ops(model._state.running[True].current()).values()))
    x, w, bias = images(), torch.randn(16, 3, 1, 1), torch.randn(16)
    of_x = Rounds(torch.tensor(4), ValueRange(torch.tensor(-4.0), torch.tensor(8.0), True))
    of_w = Rounds(torch.tensor(4), ValueRange(torch.full((16, 1, 1, 1), -4.0), torch.full((16, 1, 1, 1), 8.0), True))
    call = Call(x, w, bias, of_x, of_w, torch.tensor(8), torch.tensor(3)).flatten()
    checks = ("test_schema", "test_faketensor")
    needs, size = [True, True, True], (6, 16, 4, 4)
    torch.library.opcheck(torch.ops.fractrain_fx.forward_of, (op._number, size, needs, *call), test_utils=checks)
    g = torch.randn(6, 16, 4, 4)
    for asked in (needs, [False, True, False]):
        given = (op._number, needs, asked, g, *call)
        torch.library.opcheck(torch.ops.fractrain_fx.backward_of, given, test_utils=checks)
