"""The C++ kernels of gates: the numbers and gradients of the plain modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.testing import CompileCounterWithBackend

from fractrain_fx import FracConfig, GateConfig, RunConfig, fractrainify
from fractrain_fx.config.run import Backend
from fractrain_fx.errors import ConfigError
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.native import kernels
from fractrain_fx.nn import gate_kernels
from fractrain_fx.nn.gate_kernels import BlockEmbeddingByKernels, ControllerByKernels
from fractrain_fx.nn.gates import BlockEmbedding, Controller
from tests.residual import Residual

SIZES = GateConfig().dims
OPS = ("gate_embedding", "gate_embedding_errors", "gate_choice", "gate_choice_errors")


class Gates(nn.Module):
    """Three blocks that one controller gates; the second may not be skipped."""

    def __init__(self, features: int, compiled: bool) -> None:
        super().__init__()
        self.embedding = (BlockEmbeddingByKernels if compiled else BlockEmbedding)(
            features, 1, BatchAxis(), SIZES, "he"
        )
        self.controller = (ControllerByKernels if compiled else Controller)(GateConfig(), 5)

    def forward(self, x: Tensor) -> list[Tensor]:
        state, found = None, []
        for skippable in (True, False, True):
            choice, state = self.controller(self.embedding(x), state, skippable)
            found.append(choice)
        assert state is not None
        return [*found, *state]


def pair(features: int) -> tuple[Gates, Gates]:
    torch.manual_seed(0)
    plain, compiled = Gates(features, False), Gates(features, True)
    compiled.load_state_dict(plain.state_dict())
    return plain, compiled


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are called."""
    found: list[str] = []
    ops = kernels()

    class Watched:
        def __getattr__(self, name: str) -> Any:
            found.append(name)
            return getattr(ops, name)

    monkeypatch.setattr(gate_kernels, "kernels", Watched)
    return found


@pytest.mark.parametrize("samples", [1, 31, 32, 70])
@pytest.mark.parametrize("features", [1, 3, 64])
def test_choices_states_and_gradients_are_those_of_the_plain_modules(samples: int, features: int) -> None:
    entry = torch.randn(samples, features, 3, 3)
    weights = [torch.randn(samples, 5) for _ in range(3)] + [torch.randn(samples, GateConfig().hidden)] * 2
    found = []
    for gates in pair(features):
        x = entry.clone().requires_grad_()
        out = gates(x)
        torch.autograd.backward(out, weights)
        found.append([*out, x.grad, *(weight.grad for weight in gates.parameters())])
    for plain, compiled in zip(*found, strict=True):
        # Sums of up to 70 samples in another order.
        torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-5)
    for choice in found[1][:3]:
        assert torch.equal(choice.sum(1), torch.ones(samples)) and set(choice.unique().tolist()) <= {0.0, 1.0}
    assert not found[1][1][:, 0].any()  # the second block may not be skipped


def test_states_that_no_gradient_reaches_are_left_out() -> None:
    for gates in pair(8):
        x = torch.randn(4, 8, requires_grad=True)
        choice, _ = gates.controller(gates.embedding(x), None, True)
        (choice * torch.arange(5.0)).sum().backward()
        weight = gates.controller.cell.weight_hh
        assert x.grad is not None and x.grad.any() and weight.grad is not None and not weight.grad.any()


def test_large_values_choose_like_the_plain_modules() -> None:
    for scale in (1e3, 1e30):
        plain, compiled = (gates(scale * torch.arange(-3.0, 5.0).view(2, 4)) for gates in pair(4))
        for one, other in zip(plain, compiled, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


def test_values_that_are_no_numbers_choose_one_allowed_option() -> None:
    _, gates = pair(4)
    for choice, lowest in zip(gates(torch.full((3, 4), torch.nan))[:3], (0, 1, 0), strict=True):
        assert torch.equal(choice.argmax(1), torch.full((3,), lowest)) and torch.equal(choice.sum(1), torch.ones(3))


def test_kernels_run_for_float32_on_a_cpu_and_for_few_weights(called: list[str]) -> None:
    _, gates = pair(8)
    x = torch.randn(4, 8)
    gates(x)
    assert called == ["gate_embedding", "gate_choice"] * 3
    called.clear()
    with torch.autocast("cpu", torch.bfloat16):
        gates(x)
    copy.deepcopy(gates).double()(x.double())
    hooked = copy.deepcopy(gates)
    for layer in (hooked.embedding.hidden, hooked.controller.cell):
        layer.register_forward_pre_hook(lambda module, args: None)
    hooked(x)
    gates.controller.head, gates.embedding.output = nn.Sequential(gates.controller.head), nn.Identity()  # type: ignore[assignment]
    gates.controller.cell = nn.LSTMCell(SIZES[0], GateConfig().hidden)
    gates(x)
    assert not called
    assert not BlockEmbeddingByKernels(4096, 1, BatchAxis(), SIZES, "he")._small
    assert not ControllerByKernels(GateConfig(hidden=512), 5)._small


@pytest.mark.parametrize("features", [3, 64])
def test_compiled_graphs_call_them(features: int) -> None:
    _, gates = pair(features)
    graphs = CompileCounterWithBackend("aot_eager")
    found = []
    for run in (gates, torch.compile(gates, fullgraph=True, backend=graphs)):
        gates.zero_grad()
        x = torch.arange(8.0 * features).view(8, features, 1).sin().requires_grad_()
        out = run(x)
        torch.autograd.backward(out[:3], [torch.arange(5.0).expand(8, 5)] * 3)
        found.append([*out, x.grad, *(weight.grad for weight in gates.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    # The graph that the backend gets holds autograd's functions; the ops are in their bodies.
    names = [
        str(node.target)
        for module in graphs.graphs[0].modules()
        if isinstance(module, fx.GraphModule)
        for node in module.graph.nodes
    ]
    called = {name: sum(f"fractrain_fx.{name}" == each.removesuffix(".default") for each in names) for name in OPS}
    assert called == dict.fromkeys(OPS, 3)


def test_the_compiler_is_told_the_shapes_of_their_results() -> None:
    _, gates = pair(6)
    torch.compile(gates.embedding, backend="eager", fullgraph=True)(torch.randn(4, 6))  # the compiler asks for them
    x, h = torch.randn(4, SIZES[1]), torch.randn(4, GateConfig().hidden)
    embedding = tuple(each.detach() for each in gates.embedding.parameters())
    control = tuple(each.detach() for each in gates.controller.parameters())
    ops = torch.ops.fractrain_fx
    entry, between = torch.randn(4, 6), torch.randn(4, SIZES[0])
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (ops.gate_embedding, (entry, *embedding)),
        (ops.gate_embedding_errors, (x, entry, between, *embedding)),
    ]
    for state in ((None, None), (h, h)):
        calls.append((ops.gate_choice, (x, *state, *control, 1)))
        kept = ops.gate_choice(*calls[-1][1])[3]
        calls.append((ops.gate_choice_errors, (torch.randn(4, 5), h, None, x, *state, h, kept, *control)))
    for op, args in calls:
        torch.library.opcheck(op.default, args, test_utils=("test_schema", "test_faketensor"))


def test_a_gradient_of_a_gradient_is_refused() -> None:
    _, gates = pair(8)
    x = torch.randn(4, 8, requires_grad=True)
    for out in (gates.embedding(x), gates.controller(torch.randn(4, SIZES[1], requires_grad=True), None, True)[1][0]):
        with pytest.raises(ConfigError, match="create_graph=True"):
            torch.autograd.grad(out.sum(), list(gates.parameters()), create_graph=True, allow_unused=True)


@pytest.mark.parametrize("backend", ["plain", "cpu"])
def test_models_call_them_with_compiled_rounding(called: list[str], backend: Backend) -> None:
    config = FracConfig.paper("dfq", run=RunConfig(backend=backend))
    model = fractrainify(Residual(), config=config, example_inputs=(torch.randn(2, 6),), check=False)
    called.clear()
    model(torch.randn(4, 6)).sum().backward()
    assert bool(called) == (backend == "cpu")
