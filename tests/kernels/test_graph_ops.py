"""The kernels of the block formats inside compiled graphs: the numbers of eager mode, by one graph for all widths."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx import GraphModule

from fractrain_fx import FracModel, Precision, RunConfig
from fractrain_fx.config import RECIPES
from fractrain_fx.errors import InputError
from fractrain_fx.formats import Operand
from fractrain_fx.formats.microscaling import ELEMENTS, MicroscalingFormat
from fractrain_fx.kernels.formats import MicroscalingByKernels
from tests.build import rewritten
from tests.kernels.layouts import SEED, laid

ROUND, ROTATE = "fractrain_fx.round_operand", "fractrain_fx.rotate_operand"
LAYOUTS = ["contiguous", "reversed", "inner dimensions first", "with gaps", "expanded"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 40, 6, 8), (5, 37)], ids=str)
def test_the_compiler_is_told_where_results_lie(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> None:
    x, checks = laid(torch.randn(shape).to(dtype), layout), ("test_schema", "test_faketensor")
    numbers = [float(each) for each in ELEMENTS["e2m1"].grid]
    for bits in (torch.tensor(width) for width in (4, 16, 32)):
        for matrices in (False, True):
            for seed in (None, SEED):
                args: Any = (x, bits, [4], numbers, [1], [], 32, "e8m0", seed, matrices)
                torch.library.opcheck(torch.ops.fractrain_fx.round_operand, args, test_utils=checks)
        for dim in (0, len(shape) - 1):
            rotated = (x, [bits, bits], dim, 4, SEED)
            torch.library.opcheck(torch.ops.fractrain_fx.rotate_operand, rotated, test_utils=checks)


class Net(nn.Module):
    """Linear layers, products of activations, and perhaps a convolution, between a first and a last layer in float."""

    def __init__(self, convolution: bool) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 1) if convolution else nn.Identity()
        self.first, self.keys, self.last = nn.Linear(36, 40), nn.Linear(40, 40), nn.Linear(40, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(self.conv(torch.relu(self.stem(x))).flatten(2)))
        return self.last(torch.softmax(x @ self.keys(x).mT, -1) @ x)


def built(dtype: torch.dtype = torch.float32, **words: Any) -> FracModel:
    torch.manual_seed(0)
    # With a quantized convolution, the graph's noise is seeded by another number of the generator than in eager mode.
    net = Net(convolution=words.get("recipe") == "mxfp8").to(dtype)
    return rewritten(net, images(dtype), method="static", run=RunConfig(backend="cpu"), **words).train()


def images(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1)).to(dtype)


def step(model: FracModel, call: Any, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    out = call(x)
    out.float().square().mean().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def counted(graphs: CompileCounterWithBackend, name: str) -> int:
    parts = [part for graph in graphs.graphs for part in graph.modules() if isinstance(part, GraphModule)]
    return sum(str(node.target).startswith(name) for part in parts for node in part.graph.nodes)


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        ({"format": "mx"}, torch.float32),
        ({"format": "nvfp4"}, torch.bfloat16),
        ({"format": "mx", "recipe": "mxfp8"}, torch.float32),
        pytest.param({"format": "mx"}, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param({"format": "nvfp4"}, torch.float32, marks=pytest.mark.slow),
        pytest.param({"format": "mx", "recipe": "mxfp8"}, torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_compiled_step_gives_the_bits_of_the_eager_one(words: dict[str, Any], dtype: torch.dtype) -> None:
    eager, x = built(dtype, precision="4/4", **words), images(dtype)
    model = copy.deepcopy(eager)
    graphs = CompileCounterWithBackend("aot_eager")
    call = torch.compile(model, fullgraph=True, backend=graphs)
    for found, wanted in zip(step(model, call, x), step(eager, eager, x), strict=True):
        assert torch.equal(found, wanted)
    # Two operands of each of three products; a transform of both operands of weight gradients.
    rotations = 0 if words.get("recipe") == "mxfp8" else 4 * 2
    assert (counted(graphs, ROUND), counted(graphs, ROTATE)) == ((4 if rotations else 5) * 3 * 2, rotations)


@pytest.mark.long
def test_a_new_precision_compiles_nothing_anew() -> None:
    eager = built(format="mx", precision="4/4", recipe="mxfp8")
    model = copy.deepcopy(eager)
    graphs = CompileCounterWithBackend("aot_eager")
    call = torch.compile(model, fullgraph=True, backend=graphs)
    for precision in (Precision(4, 4), Precision(8, 8), Precision(6, 16), Precision(32, 32)):
        for each in (eager, model):
            each.set_precision(precision)
        for found, wanted in zip(step(model, call, images()), step(eager, eager, images()), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)  # sums may be added in another order
    assert graphs.frame_count == 1


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_the_compilers_own_code_around_them_gives_the_numbers_of_eager_mode(dtype: torch.dtype) -> None:
    eager, x = built(dtype, format="mx", precision="8/8"), images(dtype)
    model = copy.deepcopy(eager)
    for found, wanted in zip(step(model, torch.compile(model, fullgraph=True), x), step(eager, eager, x), strict=True):
        # Sums in another order: a value next to the middle of two levels of the next op goes to the other one. Between
        # fused ops the compiler does not round to bfloat16.
        assert (found - wanted).norm() <= (1e-2 if dtype == torch.float32 else 5e-2) * wanted.norm()


def test_plain_arithmetic_stays_for_what_the_kernels_do_not_take() -> None:
    fmt, plain = (made(RECIPES["mxfp8"]) for made in (MicroscalingByKernels, MicroscalingFormat))
    of, x = Operand("forward", "x", (1,)), torch.randn(6, 40)
    samples = torch.tensor([4, 8, 4, 0, 32, 4]).view(6, 1)
    for values, bits, ops in ((x, torch.tensor(4), 1), (x.double(), torch.tensor(4), 0), (x, samples, 0)):
        torch._dynamo.reset()
        graphs = CompileCounterWithBackend("eager")
        run = torch.compile(lambda x, bits: fmt.operand(x, bits, of), backend=graphs, fullgraph=True)
        assert torch.equal(run(values, bits), plain.operand(values, bits, of)) and counted(graphs, ROUND) == ops


def test_a_width_that_the_format_lacks_is_an_error_when_the_graph_runs() -> None:
    fmt, of = MicroscalingByKernels(RECIPES["nvfp4"]), Operand("forward", "x", (1,))
    run = torch.compile(lambda x, bits: fmt.operand(x, bits, of), backend="aot_eager", fullgraph=True)
    with pytest.raises(InputError, match="bits=8 is not a width of this format"):
        run(torch.randn(3, 40), torch.tensor(8))
