"""The Triton kernels on the CPU, by Triton's interpreter. test_triton.py runs this file in a process of its own.

Triton has to be imported with ``TRITON_INTERPRET=1``. Its interpreter cuts float32 to bfloat16 instead of rounding, so
half types are float16 here; ``make gpu`` looks at both.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fractrain_fx.config import RECIPES, AffineConfig
from fractrain_fx.execution.arithmetic import Bound, Linear
from fractrain_fx.execution.backends import cuda
from fractrain_fx.execution.backends.cuda import CUDA
from fractrain_fx.execution.plan import Call, Factor, Plan, Rounds
from fractrain_fx.formats import MicroscalingFormat, Operand, ValueRange
from fractrain_fx.formats.affine import AffineFormat, measure
from fractrain_fx.formats.affine.rounding import round_affine
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.formats.microscaling import Scaling, round_blocks
from fractrain_fx.formats.microscaling import quantize as by_plain_operations
from fractrain_fx.formats.microscaling.blocks import BlockLayout
from fractrain_fx.formats.noise import hashed
from fractrain_fx.formats.running import RangeBuffers
from fractrain_fx.kernels.formats import AffineByKernels
from fractrain_fx.kernels.triton import block_calls, calls
from fractrain_fx.kernels.triton.kernels import measured
from fractrain_fx.nn.ranges import RunningRange
from tests.models import thinned

NAN, INF = float("nan"), float("inf")


def equal(found: Tensor | None, expected: Tensor) -> bool:
    return found is not None and torch.equal(found, expected)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (calls, block_calls):
        monkeypatch.setattr(module, "on_device", lambda x: contextlib.nullcontext())


def layouts() -> Iterator[Tensor]:
    x = 3 * torch.randn(4, 6, 9, 13)
    yield from (x, x.contiguous(memory_format=torch.channels_last), x.transpose(1, 3), x[:, ::2], x.half())
    yield torch.randn(40, 75)


def ends(x: Tensor, dim: int | None) -> Iterator[ValueRange]:
    """The range of the values, and one that some lie outside of."""
    within = measure(x, dim)
    yield from (within, ValueRange(within.lo / 2, within.span / 2))


@pytest.mark.parametrize(
    ("dim", "widths"),
    thinned([(None, (2, 8, 32)), (None, (0, 31)), (0, (0, 2, 8, 31, 32)), (1, (0, 2, 8, 31, 32))], 4),
)
def test_ranges_and_roundings_are_those_of_the_plain_operations(dim: int | None, widths: tuple[int, ...]) -> None:
    for x in layouts():
        if dim is not None and dim >= x.ndim:
            continue
        within = measure(x, dim)
        lo, span = calls.measure_by_triton(x, dim, within.lo.shape)
        assert torch.equal(lo, within.lo) and torch.equal(span, within.span)
        for bits, each in itertools.product(widths, ends(x, dim)):
            found = calls.round_by_triton(x, torch.tensor(bits), each)
            assert found is not None and found.dtype == x.dtype
            assert torch.equal(found, round_affine(x, torch.tensor(bits), each)), (bits, x.stride())


def test_each_sample_has_its_own_bits_and_is_erased_at_0() -> None:
    for x in layouts():
        bits = torch.tensor([0, 2, 8, 32])[torch.arange(len(x)) % 4].view(-1, *[1] * (x.ndim - 1))
        within = measure(x)
        expected = round_affine(x, bits, within)
        assert equal(calls.round_by_triton(x, bits, within), expected)
        assert equal(calls.round_by_triton(x, bits, within, erase=True), torch.where(bits == 0, 0, expected))


def test_bits_along_several_dimensions_are_left_to_the_plain_operations() -> None:
    x = torch.randn(2, 3)
    assert calls.round_by_triton(x, torch.full((2, 3), 4), measure(x)) is None


def test_noise_is_that_of_compiled_graphs() -> None:
    x, seed = torch.rand(5000), 987654321987654321
    noise = hashed(5000, x, torch.tensor(seed)).view(-1)
    levels = ValueRange(torch.tensor(0.0), torch.tensor(255.0), True)
    found = calls.round_by_triton(x, torch.tensor(8), levels, noise=seed)
    assert found is not None
    assert torch.equal(found, (x + noise).clamp(0, 255).round()) and 0 < found.sum() < 5000


@pytest.mark.parametrize("bad", thinned([NAN, INF, -INF], 3))
def test_a_bad_value_makes_nan_of_its_range_or_of_itself_in_a_range_that_is_given(bad: float) -> None:
    x = torch.randn(10, 10)
    x[3, 4] = bad
    for dim in (None, 0):
        within = measure(x, dim)
        lo, span = calls.measure_by_triton(x, dim, within.lo.shape)
        assert torch.equal(span.isfinite(), within.span.isfinite()) and torch.equal(lo.isnan(), within.lo.isnan())
        for each in (ValueRange(lo, span, True), ValueRange(torch.tensor(-1.0), torch.tensor(2.0))):
            found = calls.round_by_triton(x, torch.tensor(4), each)
            expected = round_affine(x, torch.tensor(4), each)
            assert found is not None and torch.equal(found.nan_to_num(9), expected.nan_to_num(9))
            assert found.isnan().any()


def test_a_range_wider_than_float32_saturates_and_a_constant_has_a_grid() -> None:
    for x in (torch.tensor([-3e38, 0.0, 3e38]), torch.full((5,), 0.3)):
        within = measure(x)
        lo, span = calls.measure_by_triton(x, None, [])
        assert torch.equal(lo, within.lo) and torch.equal(span, within.span) and span.isfinite()
        found = calls.round_by_triton(x, torch.tensor(4), within)
        assert found is not None and torch.equal(found, round_affine(x, torch.tensor(4), within))


@pytest.mark.parametrize("squared", thinned([False, True], 2))
def test_the_gradient_of_gates_is_that_of_the_plain_operations(squared: bool) -> None:
    for x in (each for each in layouts() if each.ndim > 1):
        g = torch.randn_like(x)
        for within in ends(x, None):
            expected = AffineFormat().activation_gains(x, g, [0, 2, 8, 4, 32, 2], within, squared)
            found = calls.gains_by_triton(x, g, [0, 2, 8, 4, 32, 2], within, squared=squared)
            torch.testing.assert_close(found, expected.float(), rtol=1e-3, atol=1e-5 * float(expected.abs().max()))
    x, g = torch.randn(2, 10_000), torch.randn(2, 10_000)  # several blocks a sample
    found = calls.gains_by_triton(x, g, [3], measure(x), squared=squared)
    expected = AffineFormat().activation_gains(x, g, [3], measure(x), squared)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_a_running_range_moves_as_the_plain_operations_move_it() -> None:
    plain = RunningRange(AffineFormat()).train()
    lo, span, seen = torch.tensor(-7.3e6), torch.tensor(3.1e7), torch.tensor(False)  # provisional
    plain.lo.copy_(lo)
    plain.span.copy_(span)
    for ends in ((1.0, 3.0), (3.0, 7.0), (NAN, 1.0), (0.5, INF), (-1.0, -0.5)):
        x = torch.full((3000,), ends[0])
        x[2500] = ends[1]
        within, before = plain(x), lo._version
        found = calls.measure_by_triton(x, None, (), RangeBuffers(lo, span, seen), 1 - plain.keep)
        torch.testing.assert_close(found, within[:2], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close((lo, span), (plain.lo, plain.span))
        assert bool(seen) and lo._version > before  # autograd sees the write


def test_programs_that_each_measure_several_blocks_join_their_ends() -> None:
    x, parts, finished = torch.randn(70), torch.empty(8), torch.zeros(1, dtype=torch.int32)
    lo, span = torch.empty(()), torch.empty(())
    for bad in (None, 0, 33, 69):
        if bad is not None:
            x = torch.randn(70).index_fill(0, torch.tensor(bad), NAN)
        measured[3,](x, parts, finished, lo, span, lo, span, lo, 0.0, 70, 32, False, 4, 8, **calls.EXACT)
        torch.testing.assert_close((lo, span), tuple(measure(x)[:2]), rtol=0, atol=0, equal_nan=True)
        assert finished == 0  # ready for the next launch


@pytest.mark.parametrize("bits", thinned([4, 31, 0, 32], 2))
def test_a_weight_is_measured_and_rounded_at_once(bits: int) -> None:
    for w in (torch.randn(3, 2500), torch.randn(5, 2, 3, 3).half(), torch.full((2, 3), 0.3), torch.randn(4)):
        found, within = calls.round_rows_by_triton(w, torch.tensor(bits), 0) or (None, None)
        expected = measure(w, 0)
        assert found is not None and within is not None and found.dtype == w.dtype and within.measured_here
        assert torch.equal(within.lo, expected.lo) and torch.equal(within.span, expected.span)
        assert torch.equal(found, round_affine(w, torch.tensor(bits), expected))
    w = torch.tensor([[NAN, 1.0], [2.0, 3.0]])
    found, _ = calls.round_rows_by_triton(w, torch.tensor(bits), 0) or (None, None)
    assert found is not None and found.isnan().sum() == (1 if bits in (0, 32) else 2)


def test_rows_that_are_long_or_apart_are_measured_first() -> None:
    bits = torch.tensor(4)
    for w, dim in ((torch.empty(1, (1 << 16) + 1), 0), (torch.randn(3, 4).t(), 0), (torch.randn(3, 4), 1)):
        assert calls.round_rows_by_triton(w, bits, dim) is None
    assert calls.round_rows_by_triton(torch.randn(3), bits, None) is None


@pytest.mark.parametrize("bits", [4, [3, 0, 32, 6]])
@pytest.mark.parametrize("width", thinned([12, 300], 2))
def test_a_product_by_the_backend_is_that_of_the_kernels_one_by_one(
    bits: int | list[int], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "has_triton", lambda *_: True)
    fmt, axis = AffineByKernels(), BatchAxis()
    factors = Factor(fmt, (), axis, "matrices"), Factor(fmt, (), axis, "matrices", True, 0)
    plan = Plan(Linear(), (), *factors, fmt, axis)
    a, b, added, g = (torch.randn(*shape) for shape in ((4, 5, width), (width, width), (width,), (4, 5, width)))
    of_a, seed = Rounds(torch.tensor(bits), measure(a)), torch.tensor(7)
    call = Call(a, b, added, of_a, Rounds(torch.tensor(6), None), torch.tensor(bits), seed)
    assert CUDA.refuses(plan, call, (True, True, True)) is None
    out, kept = CUDA.forward(plan, call)
    expanded = axis.expand(torch.tensor(bits), a.shape)
    x = round_affine(a, expanded, measure(a))
    w = round_affine(b, torch.tensor(6), measure(b, 0))
    assert torch.equal(out, F.linear(x, w, added))
    rounded = calls.round_by_triton(g, expanded, measure(g), noise=7, erase=True)
    assert rounded is not None
    wanted = Linear().backward(rounded, Bound(x, w, added), (True, True, True))
    for ours, theirs in zip(CUDA.backward(plan, call, g, kept, (True, True, True)), wanted, strict=True):
        assert ours is not None and theirs is not None and torch.equal(ours, theirs)
    holds_zero = replace(plan, fmt=AffineByKernels(AffineConfig(gradient_grid="zero")))
    assert "gradient_grid" in str(CUDA.refuses(holds_zero, call, (True, True, True)))


def test_ops_that_read_one_activation_in_one_way_round_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rounded: list[Tensor] = []

    def counted(x: Tensor, *how: Any, **options: Any) -> Tensor | None:
        rounded.append(x)
        return calls.round_by_triton(x, *how, **options)

    monkeypatch.setattr(cuda, "round_by_triton", counted)
    fmt, axis = AffineByKernels(), BatchAxis()
    factors = Factor(fmt, (), axis, "matrices"), Factor(fmt, (), axis, "matrices", True, 0)
    plan = Plan(Linear(), (), *factors, fmt, axis)
    a, bits, within = torch.randn(4, 6), torch.tensor(4), measure(torch.randn(9))

    def forward(bits: Tensor) -> None:
        weight = Rounds(torch.tensor(6), None)
        CUDA.forward(plan, Call(a, torch.randn(3, 6), None, Rounds(bits, within), weight, None, None))

    forward(bits)
    forward(bits)
    assert len(rounded) == 1
    forward(torch.tensor(4))
    assert len(rounded) == 2
    bits.fill_(3)
    forward(bits)
    a.add_(1)
    forward(bits)
    assert len(rounded) == 4


def block_operands(x: Tensor) -> Iterator[Operand]:
    """Operands of a linear layer's and a convolution's three products."""
    batch, channels, places = (0,), (x.ndim - 1,) if x.ndim == 2 else (1,), tuple(range(2, x.ndim))
    yield Operand("forward", "x", channels, across=batch, positions=places)
    yield Operand("input_gradient", "w", (0,), across=(1,), weight=True, positions=places)
    yield Operand("weight_gradient", "g", (*batch, *places), across=channels)


def block_inputs() -> Iterator[Tensor]:
    x = torch.randn(6, 70) * torch.logspace(-6, 6, 70)
    x[0, 3], x[1, 40], x[2] = NAN, INF, 0
    image = torch.randn(3, 36, 2, 3).contiguous(memory_format=torch.channels_last)
    yield from (x, x.half()[:, ::2], torch.randn(40, 140).t(), image)


# Recipes with every kind of scale.
@pytest.mark.parametrize("name", thinned(["mxfp8", "nvfp4", "fp8", "deepseek", "jetfire", "int8"], 3))
def test_blocks_are_those_of_the_plain_operations(name: str) -> None:
    plain = MicroscalingFormat(RECIPES[name])
    for number, x in enumerate(block_inputs()):
        for of in block_operands(x):
            how, elements = plain._how(of), plain._elements[of.product, of.tensor]
            cuts, scale = plain._cuts(x, of, how)
            for bits in (*elements, 16, 32, 0) if number == 0 else elements:
                found = block_calls.round_blocks_by_triton(x, torch.tensor(bits), elements, cuts, scale)
                assert found is not None and found.dtype == x.dtype
                wanted = x if bits in (0, 32) else plain.operand(x, 16, of) if bits == 16 else None
                if wanted is None:
                    wanted = round_blocks(x, elements[bits], BlockLayout(x.shape, cuts), Scaling(scale))
                torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", thinned(["mxfp8", "jetfire", "fp8"], 3))
def test_samples_of_a_block_have_their_own_bits(name: str) -> None:
    plain, x = MicroscalingFormat(RECIPES[name]), torch.randn(6, 70)
    widths = {"fp8": (0, 8, 16, 32)}.get(name, (0, 4, 8, 32))
    bits = torch.tensor(widths)[torch.arange(6) % 4].view(-1, 1)
    for of in block_operands(x):
        cuts, scale = plain._cuts(x, of, plain._how(of))
        elements = plain._elements[of.product, of.tensor]
        arguments = x, bits.expand(6, 70), elements, cuts, scale
        wanted = plain._rounded(*arguments, of, {"stochastic": False, "seed": None})
        found = block_calls.round_blocks_by_triton(x, bits, elements, cuts, scale)
        assert found is not None and torch.equal(found, wanted)


def test_the_noise_of_blocks_is_the_hash_of_each_place(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, seed = MicroscalingFormat(RECIPES["mxfp4"]), 123456789012345
    x, of = torch.randn(64, 96), Operand("weight_gradient", "g", (0,), across=(1,))
    cuts, scale = plain._cuts(x, of, plain._how(of))
    elements = plain._elements[of.product, of.tensor]
    found = block_calls.round_blocks_by_triton(x, torch.tensor(4), elements, cuts, scale, noise=seed)
    noise = BlockLayout(x.shape, cuts).split(hashed(x.numel(), x.flatten(), torch.tensor(seed)).view(x.shape))
    monkeypatch.setattr(by_plain_operations, "dither", lambda like, seed: noise)
    assert found is not None and torch.equal(
        found,
        round_blocks(x, elements[4], BlockLayout(x.shape, cuts), Scaling(scale), stochastic=True, seed=torch.tensor(0)),
    )


def test_bits_along_several_dimensions_are_left_to_the_plain_blocks() -> None:
    plain, x, of = MicroscalingFormat(RECIPES["mxfp8"]), torch.randn(4, 40), Operand("forward", "x", (1,))
    cuts, scale = plain._cuts(x, of, plain._how(of))
    elements = plain._elements[of.product, of.tensor]
    assert block_calls.round_blocks_by_triton(x, torch.full((4, 40), 4), elements, cuts, scale) is None
