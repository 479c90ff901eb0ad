"""What one sweep of a C++ kernel counts of an operand rounded in blocks is what plain torch functions count."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fractrain_fx.config import RECIPES
from fractrain_fx.execution.roundings import Rounding
from fractrain_fx.formats import MicroscalingFormat, Operand
from fractrain_fx.kernels.formats import MicroscalingByKernels
from fractrain_fx.numerics.statistics import COLUMNS, Measured, measure
from tests.formats.microscaling.values import tensors
from tests.kernels.layouts import SEED, laid

NORMS = slice(COLUMNS.index("signal"), COLUMNS.index("noise") + 1)


def measured(x: Tensor, of: Operand, name: str, bits: int) -> tuple[Measured, Measured]:
    """By the kernel, and by plain functions, of the same rounded values."""
    recipe = RECIPES[name]
    fmt = MicroscalingByKernels(recipe, ("cpu",))
    by_kernel = Rounding(x, torch.tensor(bits), of, fmt, seed=SEED)
    rounded = by_kernel.rounded()
    assert fmt.count(x, rounded, by_kernel.bits, of) is not None
    return measure(by_kernel), measured_plainly(by_kernel, rounded)


def measured_plainly(rounding: Rounding, rounded: Tensor) -> Measured:
    """By plain functions, of values that were rounded before."""

    class Given(MicroscalingFormat):
        def operand(self, *_: object, **__: object) -> Tensor:
            return rounded

    assert rounding.fmt.recipe is not None
    return measure(replace(rounding, fmt=Given(rounding.fmt.recipe)))


def check(x: Tensor, of: Operand, name: str, bits: int) -> None:
    found, wanted = measured(x, of, name, bits)
    # Sums of squares in another order; the plain ones are in float32.
    torch.testing.assert_close(found.numbers[NORMS], wanted.numbers[NORMS], rtol=1e-4, atol=0, equal_nan=True)
    torch.testing.assert_close(found.numbers, wanted.numbers, rtol=1e-4, atol=0, equal_nan=True)
    others = [place for place in range(len(COLUMNS)) if place not in range(NORMS.start, NORMS.stop)]
    assert torch.equal(found.numbers[others].nan_to_num(7.0), wanted.numbers[others].nan_to_num(7.0))
    assert found.scales is not None and wanted.scales is not None
    assert torch.equal(found.scales, wanted.scales) and found.scales.sum() <= found.numbers[COLUMNS.index("blocks")]


RECIPES_HERE = [("mxfp8", 8), ("mxfp4", 4), ("nvfp4", 4), ("fp8", 8), ("deepseek", 8), ("jetfire", 8), ("int8", 8)]
OPERANDS = {
    "x of a convolution": ((5, 33, 6, 7), Operand("forward", "x", (1,), across=(0, 2, 3), positions=(2, 3))),
    "x for the weight's gradient": ((5, 33, 6, 7), Operand("weight_gradient", "x", (0, 2, 3), positions=(2, 3))),
    "w of a convolution": ((40, 33, 3, 3), Operand("forward", "w", (1, 2, 3), channel=0, across=(0,), weight=True)),
    "w for the input's gradient": ((40, 33, 3, 3), Operand("input_gradient", "w", (0,), channel=0, weight=True)),
    "g for the input": ((5, 40, 6, 7), Operand("input_gradient", "g", (1,), across=(0, 2, 3))),
    "g for the weight": ((5, 40, 6, 7), Operand("weight_gradient", "g", (0, 2, 3), across=(1,))),
    "x of a linear layer": ((3, 50, 130), Operand("forward", "x", (2,), across=(0, 1))),
    "w of a linear layer": ((70, 130), Operand("forward", "w", (1,), channel=0, across=(0,), weight=True)),
}


@pytest.mark.parametrize(("name", "bits"), RECIPES_HERE, ids=[name for name, _ in RECIPES_HERE])
@pytest.mark.parametrize("operand", OPERANDS)
def test_a_sweep_counts_what_plain_functions_count(operand: str, name: str, bits: int) -> None:
    shape, of = OPERANDS[operand]
    values = torch.randn(shape).relu() * (3 * torch.randn(shape)).exp()  # zeros, and some far below their scale
    for layout in ("contiguous", "reversed", "inner dimensions first", "with gaps"):
        check(laid(values, layout), of, name, bits)


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("four-over-six", Operand("forward", "x", (1,), across=(0,))),
        ("tetrajet-v2", Operand("weight_gradient", "g", (0,), across=(1,))),
        ("quartet-ii", Operand("weight_gradient", "g", (0,), across=(1,))),
    ],
)
def test_scales_that_no_kernel_computes_are_counted_by_plain_functions(name: str, of: Operand) -> None:
    x = torch.randn(64, 256) * (2 * torch.randn(64, 256)).exp()
    rounding = Rounding(x, torch.tensor(4), of, MicroscalingByKernels(RECIPES[name], ("cpu",)), seed=SEED)
    found, wanted = measure(rounding), measured_plainly(rounding, rounding.rounded())
    assert torch.equal(found.numbers.nan_to_num(7.0), wanted.numbers.nan_to_num(7.0))
    assert found.scales is not None and wanted.scales is not None and torch.equal(found.scales, wanted.scales)


@pytest.mark.parametrize(("name", "bits"), RECIPES_HERE, ids=[name for name, _ in RECIPES_HERE])
def test_it_counts_values_of_any_size_and_those_that_are_not_finite(name: str, bits: int) -> None:
    of = Operand("forward", "x", (1,), across=(0,))
    normal = tensors()["normal"]
    bad = {f"with {value}": normal.index_fill(1, torch.tensor([5]), value) for value in (math.nan, math.inf, -math.inf)}
    for x in (*tensors().values(), *bad.values(), 0 * normal, 1e-40 * normal, normal.bfloat16()):
        check(x, of, name, bits)
    found, _ = measured(bad["with nan"], of, name, bits)
    assert found.numbers[COLUMNS.index("lo")].isnan() and found.numbers[COLUMNS.index("hi")].isnan()


def test_threads_add_what_they_counted() -> None:
    of, x = Operand("weight_gradient", "x", (0,)), torch.randn(1024, 520)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check(x, of, "mxfp8", 8)
        check(x, of, "fp8", 8)
    finally:
        torch.set_num_threads(threads)


def test_operands_that_the_kernel_does_not_take_are_counted_by_plain_functions() -> None:
    of, x = Operand("forward", "x", (1,), across=(0,)), torch.randn(8, 64)
    for name, bits, values in (
        ("four-over-six", torch.tensor(4), x),
        ("mxfp8", torch.tensor([8] * 4 + [6] * 4)[:, None], x),
        ("mxfp8", torch.tensor(16), x),
        ("mxfp8", torch.tensor(8), x.double()),
    ):
        fmt = MicroscalingByKernels(RECIPES[name], ("cpu",))
        rounding = Rounding(values, bits, of, fmt)
        assert fmt.count(values, rounding.rounded(), bits, of) is None
        plain = measure(replace(rounding, fmt=MicroscalingFormat(RECIPES[name])))
        torch.testing.assert_close(measure(rounding).numbers, plain.numbers, rtol=1e-6, atol=0, equal_nan=True)
