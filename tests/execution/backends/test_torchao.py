"""One product that torchao computes, forward and backward, beside the plain backend's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fractrain_fx import Precision
from fractrain_fx.config import RECIPES, Recipe
from fractrain_fx.execution.arithmetic import AddMatMul, Arithmetic, Linear, MatMul
from fractrain_fx.execution.backends.plain import PLAIN
from fractrain_fx.execution.backends.torchao import TORCHAO, not_linear
from fractrain_fx.execution.plan import NOTHING_KEPT, Call, Factor, Plan, Rounds
from fractrain_fx.execution.torchao_kernels import Kind
from fractrain_fx.formats import get_format
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.nn.rounding import unrounded_gradients
from tests.swapping import KINDS, place

ALL = (True, True, True)
RECIPE: dict[Kind, str] = {"int8": "int8", "float8": "fp8", "mxfp8": "mxfp8"}
TOLERANCE: dict[Kind, float] = {"int8": 1e-6, "float8": 1e-6, "mxfp8": 0.0}  # sums of codes run in another order

ARITHMETIC: dict[str, tuple[Arithmetic, tuple[int, ...]]] = {
    "linear": (Linear(), ()),
    "addmm": (AddMatMul(("input", "mat1", "mat2")), (1, 1)),
    "matmul": (MatMul(), ()),
}


def _case(
    kind: Kind, shape: tuple[int, ...], form: str = "linear", bits: str = "8/8", recipe: str | Recipe = ""
) -> tuple[Plan, Call, Tensor]:
    """A product with a weight of 48 (or 64) outputs, and the gradient of its output."""
    torch.manual_seed(0)
    device = place(kind)
    arithmetic, static = ARITHMETIC[form]
    how = RECIPES[recipe or RECIPE[kind]] if isinstance(recipe, str) else recipe
    fmt = get_format(how.format, recipe=how)
    factors = Factor(fmt, (), BatchAxis(), "matrices"), Factor(fmt, (), BatchAxis(), "matrices", True, 0)
    plan = Plan(arithmetic, static, *factors, fmt, BatchAxis())
    outputs = 64 if kind == "mxfp8" else 48
    x, g = torch.randn(shape, device=device), torch.randn(*shape[:-1], outputs, device=device)
    weight = torch.randn(outputs, shape[-1], device=device)
    bias = None if form == "matmul" else torch.randn(outputs, device=device)
    precision = Precision.parse(bits)
    fw, bw = (torch.tensor(each, device=device) for each in (precision.fw, precision.bw))
    rounds, seed = Rounds(fw, None), torch.tensor(7, device=device)
    weight = weight if form == "linear" else weight.t().contiguous()
    return plan, Call(x, weight, bias, rounds, rounds, bw, seed, precision), g


def _run(backend: Any, plan: Plan, call: Call, g: Tensor) -> list[Tensor]:
    out, kept = backend.forward(plan, call)
    return [out, *(x for x in backend.backward(plan, call, g, kept, ALL) if x is not None)]


def _near(kind: Kind, found: list[Tensor], wanted: list[Tensor]) -> bool:
    if TOLERANCE[kind] == 0:
        return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    distances = [(a - b).norm() / b.norm() for a, b in zip(found, wanted, strict=True)]
    return max(distances) < TOLERANCE[kind] and all(a.shape == b.shape for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kind", (*KINDS, "mxfp8"))
@pytest.mark.parametrize("shape", [(1, 32), (5, 32), (2, 3, 7, 32)])
def test_outputs_and_gradients_are_the_simulations(kind: Kind, shape: tuple[int, ...]) -> None:
    case = _case(kind, shape)
    assert TORCHAO.refuses(*case[:2], ALL) is None
    assert _near(kind, _run(TORCHAO, *case), _run(PLAIN, *case))


@pytest.mark.parametrize("kind", (*KINDS, "mxfp8"))
@pytest.mark.parametrize("form", ["addmm", "matmul"])
def test_weights_may_lie_the_other_way_round(kind: Kind, form: str) -> None:
    case = _case(kind, (6, 32), form)
    assert _near(kind, _run(TORCHAO, *case), _run(PLAIN, *case))
    assert not_linear(case[0].arithmetic, (1, 1)) is None
    assert form == "matmul" or "scales" in str(not_linear(case[0].arithmetic, (1, 2)))


@pytest.mark.parametrize("bits", ["8/16", "16/8", "4/8"])
def test_each_product_has_the_kernel_of_its_own_bits(bits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, call, g = _case("mxfp8", (40, 32), bits=bits, recipe=Recipe("mx", by_product=True))
    rounded: list[bool] = []
    emulated = TORCHAO.forward.__globals__["_emulated"]

    def counted(*given: Any, **how: Any) -> Any:
        rounded.append(True)
        return emulated(*given, **how)

    monkeypatch.setitem(TORCHAO.forward.__globals__, "_emulated", counted)
    assert _near("mxfp8", _run(TORCHAO, plan, call, g), _run(PLAIN, plan, call, g))
    assert len(rounded) == {"8/16": 2, "16/8": 4, "4/8": 4}[bits]  # operands that torchao rounded
    assert (TORCHAO.refuses(plan, call._replace(bits=None), ALL) is None) == bits.startswith("8")


def test_switchback_multiplies_int8_twice_and_16_bits_once() -> None:
    case = _case("int8", (6, 32), recipe="switchback")
    assert TORCHAO.refuses(*case[:2], ALL) is None
    assert _near("int8", _run(TORCHAO, *case), _run(PLAIN, *case))


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_gives_the_half_type(kind: Kind) -> None:
    plan, call, g = _case(kind, (4, 32))
    half = call._replace(a=call.a.bfloat16())  # as a layer before it gives it
    with torch.autocast(call.a.device.type, torch.bfloat16):
        out, _ = TORCHAO.forward(plan, half)
        gradients = TORCHAO.backward(plan, half, g.bfloat16(), NOTHING_KEPT, ALL)
    again = TORCHAO.backward(plan, half, g.bfloat16(), NOTHING_KEPT, ALL)  # a loop calls backward outside of autocast
    assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))  # type: ignore[arg-type]
    wanted, (of_x, of_weight, _) = PLAIN.forward(plan, call)[0], PLAIN.backward(plan, call, g, NOTHING_KEPT, ALL)
    assert out.dtype == gradients[0].dtype == torch.bfloat16  # type: ignore[union-attr]
    for found, exact in ((out, wanted), (gradients[0], of_x), (gradients[1], of_weight)):
        # Eight bits hold to a hundredth; values that change their level by the rounding to bfloat16 add as much.
        assert (found - exact).norm() < 0.04 * exact.norm()  # type: ignore[operator,union-attr]


def test_what_it_cannot_take_is_refused_and_unrounded_gradients_are_plain() -> None:
    plan, call, g = _case("float8", (4, 32))
    for changes, reason in (
        ({"precision": None}, "only tensors know"),
        ({"a": call.a[:0]}, "or nothing"),
        ({"a": call.a[0]}, "multiplies a vector"),
        ({"a": call.a.double()}, "two types"),
        ({"a": call.a.double(), "b": call.b.double()}, "computes in torch.float64"),
        ({"precision": Precision(4, 4)}, "multiplies 4 bits by 4"),
    ):
        assert reason in str(TORCHAO.refuses(plan, call._replace(**changes), ALL))
    with unrounded_gradients():
        found = TORCHAO.backward(plan, call, g, NOTHING_KEPT, ALL)
        wanted = PLAIN.backward(plan, call, g, NOTHING_KEPT, ALL)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))  # type: ignore[arg-type]
