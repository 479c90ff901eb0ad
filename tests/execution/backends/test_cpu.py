"""The backend of C++ kernels: the numbers of the plain one, for good and bad values, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fractrain_fx.execution.arithmetic import Linear
from fractrain_fx.execution.backends import cpu
from fractrain_fx.execution.backends.cpu import CPU
from fractrain_fx.execution.backends.plain import PLAIN
from fractrain_fx.execution.plan import Call, Factor, Plan, Rounds
from fractrain_fx.formats import AffineFormat, DoReFaFormat, Format
from fractrain_fx.kernels.formats import AffineByKernels
from fractrain_fx.nn.batch_axis import BatchAxis
from fractrain_fx.nn.rounding import rounded_gradient

KERNELS = AffineByKernels()
NEEDS = (True, True, True)


def plan_of(fmt: Format = KERNELS, channel: int = 0) -> Plan:
    axis = BatchAxis()
    activation = Factor(fmt, (3, 4, 6), axis, "matrices")
    return Plan(Linear(), (), activation, Factor(fmt, (), axis, "matrices", True, channel), fmt, axis)


def call_of(a: Tensor, b: Tensor, bits: Any = 4, w: int = 6, g: int = 8) -> Call:
    of_a = Rounds(torch.tensor(bits), KERNELS.activation_range(a))
    return Call(a, b, torch.randn(len(b)), of_a, Rounds(torch.tensor(w), None), torch.tensor(g), torch.tensor(11))


def operands(large: bool = False) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    width = 300 if large else 20
    return torch.randn(4, 5, width), torch.randn(width, width)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("bits", [4, [3, 0, 32, 6]])
@pytest.mark.parametrize("channel", [0, 1])
def test_a_product_and_its_gradients_are_those_of_the_plain_backend(large: bool, bits: Any, channel: int) -> None:
    plan, call = plan_of(channel=channel), call_of(*operands(large), bits)
    g = torch.randn(4, 5, len(call.b))
    assert CPU.refuses(plan, call, NEEDS) is None
    found, wanted = (backend.forward(plan, call) for backend in (CPU, PLAIN))
    assert torch.equal(found[0], wanted[0])
    of_found = CPU.backward(plan, call, g, found[1], NEEDS)
    of_wanted = PLAIN.backward(plan, call, g, wanted[1], NEEDS)
    assert all(torch.equal(a, b) for a, b in zip(of_found, of_wanted, strict=True) if a is not None and b is not None)


@pytest.mark.parametrize("bits", [1, 4, 8, 16])
def test_a_weight_is_measured_and_rounded_in_one_pass(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(AffineFormat, "weight_range")  # not by itself
    plan, w = plan_of(), operands()[1]
    found = cpu._rounded(plan.second, w, Rounds(torch.tensor(bits), None), 1, "matrices")
    assert found is not None and torch.equal(
        found.values, KERNELS.weight(w, torch.tensor(bits), dim=0, within=found.within)
    )
    for ours, theirs in zip(found.within[:2], KERNELS.measure(w, 0)[:2], strict=True):
        assert torch.equal(ours, theirs)


def test_a_weight_may_change_without_a_sign() -> None:
    plan, w = plan_of(), operands()[1]
    for _ in range(2):
        found = cpu._rounded(plan.second, w, Rounds(torch.tensor(4), None), 1, "matrices")
        assert found is not None and torch.equal(found.values, KERNELS.weight(w, 4, dim=0))
        w.data.mul_(2)  # no new version


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize("place", ["a", "b"])
def test_a_bad_operand_leaves_the_whole_product_to_the_plain_backend(bad: float, place: str) -> None:
    a, b = operands()
    values = a if place == "a" else b
    values.view(-1)[:2] = torch.tensor([bad, -1e38])
    plan, call = plan_of(), call_of(a, b)
    g = torch.randn(4, 5, len(b))
    results = []
    for backend in (CPU, PLAIN):
        out, kept = backend.forward(plan, call)
        results.append((out, *backend.backward(plan, call, g, kept, NEEDS)))
    for ours, theirs in zip(*results, strict=True):
        assert ours is not None and torch.equal(ours.nan_to_num(), theirs.nan_to_num())


@pytest.mark.parametrize("fmt", [KERNELS, AffineByKernels("zero")])
@pytest.mark.parametrize("bits", [(6,), (0, 3, 4, 32, 6)])
def test_a_gradient_is_that_of_every_format(bits: tuple[int, ...], fmt: AffineFormat) -> None:
    g, seed = torch.randn(5, 40, 8), torch.tensor(11)
    widths = torch.tensor(bits[0] if len(bits) == 1 else bits)
    call = call_of(torch.randn(5, 40, 8), torch.randn(8, 8))._replace(bits=widths, seed=seed)
    found = cpu._gradient(plan_of(fmt), call, g, "matrices")
    assert found is not None and torch.equal(found, rounded_gradient(fmt, g, widths, BatchAxis(), seed))
    g[1, 2, 3] = torch.nan
    assert cpu._gradient(plan_of(fmt), call, g, "matrices") is None


def test_an_activation_that_the_op_before_rounded_is_not_rounded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, (x, _) = plan_of(), operands()
    bits, within = torch.tensor([3, 4, 6, 3]), KERNELS.activation_range(x)
    first = cpu._rounded(plan.first, x, Rounds(bits, within), 0, "matrices")
    assert first is not None and torch.equal(first.values, KERNELS.activation(x, bits.view(-1, 1, 1), within))
    with monkeypatch.context() as patched:
        patched.delattr(cpu, "round_compiled")
        alike = Rounds(bits.clone(), within._replace(lo=within.lo.clone()))
        again = cpu._rounded(plan.first, x, alike, 0, "matrices")
        assert again is not None and again.values is first.values
    other = cpu._rounded(plan.first, x, Rounds(bits + 1, within), 0, "matrices")
    assert other is not None and torch.equal(other.values, KERNELS.activation(x, bits.view(-1, 1, 1) + 1, within))
    x.add_(1)
    wider = KERNELS.activation_range(x)
    written = cpu._rounded(plan.first, x, Rounds(bits, wider), 0, "matrices")
    assert written is not None and torch.equal(written.values, KERNELS.activation(x, bits.view(-1, 1, 1), wider))


def test_it_refuses_what_kernels_do_not_round_entirely() -> None:
    a, b = operands()
    call = call_of(a, b)
    for fmt in (AffineFormat(), DoReFaFormat(), AffineByKernels(kernels=("cuda",))):
        assert "C++ kernels" in str(CPU.refuses(plan_of(fmt), call, NEEDS))
    plan = plan_of()
    for other in (call._replace(a=a.double()), call._replace(b=b[:0]), call._replace(a=a.to("meta"))):
        assert "another device" in str(CPU.refuses(plan, other, NEEDS))
    with torch.autocast("cpu", torch.bfloat16):
        assert CPU.refuses(plan, call, NEEDS) == "runs under autocast"
