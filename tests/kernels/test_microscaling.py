"""The C++ kernels of the block formats: the values of the plain arithmetic, for every layout, axis and bad value."""

from __future__ import annotations

import copy
import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

from fractrain_fx import FracConfig, RunConfig
from fractrain_fx.config import RECIPES
from fractrain_fx.formats import Operand
from fractrain_fx.formats.microscaling import ELEMENTS, MicroscalingFormat
from fractrain_fx.formats.microscaling.blocks import BlockLayout, Cut
from fractrain_fx.formats.microscaling.hadamard import rotate, rotation
from fractrain_fx.formats.microscaling.quantize import Scaling, round_blocks
from fractrain_fx.formats.microscaling.scales import Scale
from fractrain_fx.kernels import microscaling
from fractrain_fx.kernels.formats import MicroscalingByKernels
from fractrain_fx.kernels.microscaling import rotate_compiled, round_blocks_compiled
from fractrain_fx.native import kernels
from tests.build import rewritten
from tests.everything import Everything
from tests.formats.microscaling.values import tensors
from tests.kernels.layouts import SEED, laid

SHARED: list[tuple[Scale, int | None]] = [("e8m0", 32), ("e4m3", 16), ("float32", 32), ("float32", None)]


def assert_equal(found: Tensor, wanted: Tensor) -> None:
    """Equal bits, also of zeros; one NaN is like another."""
    same = (found.view(torch.int32) == wanted.view(torch.int32)) | (found.isnan() & wanted.isnan())
    assert found.shape == wanted.shape and same.all()


def check(x: Tensor, cuts: list[Cut], scale: Scale, element: str) -> None:
    grid = ELEMENTS[element].grid
    wanted = round_blocks(x, grid, BlockLayout(x.shape, cuts), Scaling(scale))
    for matrices in (False, True):
        assert_equal(round_blocks_compiled(x, grid, cuts, scale, matrices=matrices), wanted)


def every_kind() -> dict[str, Tensor]:
    """The tensors that are compared with torchao's, and those that no scale fits."""
    normal = tensors()["normal"]
    bad = {f"with {value}": normal.clone().index_fill_(1, torch.tensor([5]), value) for value in (math.nan, -math.inf)}
    return {
        **tensors(),
        **bad,
        "zero": 0 * normal,
        "subnormal": 1e-40 * normal,
        "of all sizes": (40 * normal).exp() * normal.sign(),
    }


@pytest.mark.parametrize("x", every_kind().values(), ids=every_kind())
@pytest.mark.parametrize("element", ELEMENTS)
def test_values_are_those_of_the_plain_arithmetic(x: Tensor, element: str) -> None:
    for scale, size in SHARED:
        for axis in (0, 1):
            check(x, [Cut((axis,), size)], scale, element)
        if size is not None:
            check(x, [Cut((1,), size), Cut((0,), size)], scale, element)
    check(x, [Cut((0, 1), None)], "float32", element)


@pytest.mark.parametrize("layout", ["contiguous", "reversed", "inner dimensions first", "with gaps", "expanded"])
@pytest.mark.parametrize("shape", [(3, 40, 6, 8), (2, 33, 7, 7), (4, 5, 3, 3), (5, 64, 1, 1)], ids=str)
def test_blocks_lie_along_any_dimensions_in_any_layout(shape: tuple[int, ...], layout: str) -> None:
    x = laid(torch.randn(shape), layout)
    for scale, size in SHARED:
        for dims in ((0,), (1,), (3,), (0, 2, 3), (2, 3), (1, 2, 3)):
            check(x, [Cut(dims, size)], scale, "e2m3")
        if size is not None:
            check(x, [Cut((1,), size), Cut((0,), size)], scale, "e2m1")
            check(x, [Cut((1,), size), Cut((0, 2, 3), size)], scale, "e2m1")
    check(x, [Cut((0, 1, 2, 3), None)], "float32", "e5m2")


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=80),
    st.sampled_from(sorted(ELEMENTS)),
    st.sampled_from(SHARED),
    st.integers(1, 5),
)
def test_any_values_of_any_number(numbers: list[float], element: str, shared: tuple[Scale, int | None], n: int) -> None:
    scale, size = shared
    x = torch.tensor(numbers)
    check(x, [Cut((0,), size)], scale, element)
    rows = x.repeat(n, 1)
    for axis in (0, 1):
        check(rows, [Cut((axis,), size)], scale, element)


@pytest.mark.parametrize("shared", SHARED, ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_stochastic_rounding_has_the_right_mean_and_variance(shared: tuple[Scale, int | None], axis: int) -> None:
    # The last value fixes the scale; the others do not saturate.
    x = torch.cat([torch.linspace(0.02, 3.9, 15), torch.tensor([4.0])]).repeat(20_000, 1)
    x = x.flatten().repeat(2, 1).t().contiguous() if axis == 0 else x.flatten().repeat(2, 1)
    cuts = [Cut((axis,), 16 if shared[1] else None)]
    found = round_blocks_compiled(x, ELEMENTS["e2m1"].grid, cuts, shared[0], stochastic=True, seed=SEED)
    found, x = (each.movedim(axis, 1).reshape(-1, 16) for each in (found, x))
    grid = found.unique()
    low = grid[torch.searchsorted(grid, x[0].contiguous(), right=True) - 1]
    high = grid[torch.searchsorted(grid, x[0].contiguous()).clamp(max=len(grid) - 1)]
    variance = (high - x[0]) * (x[0] - low)
    # Five standard errors; one value in 4 million lies outside.
    assert ((found.mean(0) - x[0]).abs() <= 5 * (variance / 40_000).sqrt() + 1e-6).all()
    assert torch.allclose(found.var(0), variance, rtol=0.1, atol=1e-6)


def test_noise_follows_the_seed_and_no_two_values_share_it() -> None:
    grid = ELEMENTS["e2m1"].grid

    def rounded(x: Tensor, seed: int | None) -> Tensor:
        given_seed = None if seed is None else torch.tensor(seed)
        return round_blocks_compiled(x, grid, [Cut((1,), 32)], "e8m0", stochastic=True, seed=given_seed)

    x = torch.full((1, 1), 2.5).expand(400, 64)
    assert torch.equal(rounded(x, 1), rounded(x, 1)) and not torch.equal(rounded(x, 1), rounded(x, 2))
    rows = rounded(x, 1)
    assert not torch.equal(rows[0], rows[1]) and abs(float(rows.mean()) - 2.5) < 5 * 0.5 / 25_600**0.5
    torch.manual_seed(0)
    free = [rounded(x, None) for _ in range(2)]
    torch.manual_seed(0)
    assert torch.equal(free[0], rounded(x, None)) and not torch.equal(*free)


@pytest.mark.parametrize("shape", [(37, 5), (48, 300), (32, 3, 5, 7)], ids=str)
@pytest.mark.parametrize("width", [2, 16, 128])
def test_the_transform_is_that_of_the_plain_arithmetic(shape: tuple[int, ...], width: int) -> None:
    for x, dim in ((torch.randn(shape), 0), (torch.randn(shape).movedim(0, 1), 1)):
        found, wanted = rotate_compiled(x, dim, width, SEED), rotate(x, dim, rotation(width, SEED, x))
        # Sums of up to 128 values in another order.
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    x = torch.randn(5, 37)  # nothing lies beside these values: the plain arithmetic
    assert torch.equal(rotate_compiled(x, 1, width, SEED), rotate(x, 1, rotation(width, SEED, x)))


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are called."""
    found: list[str] = []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            found.append(name)
            return getattr(ops, name)

    ops = kernels()
    monkeypatch.setattr(microscaling, "kernels", Watched)
    return found


def test_the_format_calls_them_for_one_width(called: list[str]) -> None:
    fmt, plain = (made(RECIPES["mxfp8"]) for made in (MicroscalingByKernels, MicroscalingFormat))
    of, x, half = Operand("forward", "x", (1,)), torch.randn(6, 40), torch.randn(6, 40).bfloat16()
    assert torch.equal(fmt.operand(x, 4, of), plain.operand(x, 4, of)) and called == ["round_blocks"]
    assert torch.equal(fmt.operand(half, 4, of), plain.operand(half, 4, of)) and len(called) == 2
    for bits in (torch.tensor([4, 8, 4, 0, 32, 4]).view(6, 1), 16, 32):
        assert torch.equal(fmt.operand(x, bits, of), plain.operand(x, bits, of))
    assert torch.equal(fmt.operand(x.double(), 4, of), plain.operand(x.double(), 4, of)) and len(called) == 2


def test_both_products_that_read_a_square_block_get_the_same_noise() -> None:
    fmt, g = MicroscalingByKernels(RECIPES["jetfire"]), torch.randn(40, 70)
    pair = (Operand("input_gradient", "g", (1,), across=(0,)), Operand("weight_gradient", "g", (0,), across=(1,)))
    first, second = (fmt.operand(g, 8, of, seed=SEED) for of in pair)
    assert torch.equal(first, second) and not torch.equal(first, fmt.operand(g, 8, pair[0], seed=SEED + 1))
    apart = MicroscalingByKernels(RECIPES["mxfp4"])
    first, second = (apart.operand(g, 4, Operand(of.product, "g", (1,)), seed=SEED) for of in pair)
    assert not torch.equal(first, second)


def steps(words: dict[str, Any], backend: str, net: nn.Module, x: Tensor) -> list[Tensor]:
    config = FracConfig(method="static", run=RunConfig(backend=backend), **words)  # type: ignore[arg-type]
    model = rewritten(copy.deepcopy(net), x, config=config).train()
    torch.manual_seed(3)
    out = model(x)
    out.square().sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    "words",
    [
        {"format": "mx", "precision": "8/8"},
        {"format": "mx", "precision": "4/6", "recipe": "mxfp8"},
        {"format": "fp8", "precision": "8/8"},
        {"format": "int", "precision": "8/8", "recipe": "switchback"},
    ],
    ids=str,
)
def test_a_step_of_every_family_rounded_to_nearest_is_that_of_the_plain_arithmetic(words: dict[str, Any]) -> None:
    net, x = Everything(), torch.randn(4, 6, 8)
    for plain, compiled in zip(*(steps(words, each, net, x) for each in ("plain", "cpu")), strict=True):
        # Equal operands; where they lie otherwise in memory, sums are taken in another order, and a value next to the
        # middle of two levels of the next op goes to the other one.
        assert (plain - compiled).norm() <= 1e-3 * plain.norm()


@pytest.mark.parametrize("words", [{"format": "mx"}, {"format": "nvfp4"}], ids=str)
def test_a_stochastic_step_is_as_near_to_float_as_that_of_the_plain_arithmetic(words: dict[str, Any]) -> None:
    net, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), torch.randn(512, 64)
    words = {**words, "precision": "4/4"}
    exact = steps({"format": "mx", "precision": "32/32"}, "plain", net, x)
    far = [
        [
            float((each - other).norm() / other.norm())
            for each, other in zip(steps(words, how, net, x), exact, strict=True)
        ]
        for how in ("plain", "cpu")
    ]
    for plain, compiled in zip(*far, strict=True):
        assert compiled == pytest.approx(plain, rel=0.2)  # two draws of the noise of 4,096 values


def test_threads_round_alike() -> None:
    x, grid = torch.randn(64, 48, 32, 8), ELEMENTS["e2m1"].grid
    kinds: list[tuple[tuple[int, ...], int | None, Scale]]
    kinds = [((1,), 32, "e8m0"), ((0, 2, 3), 16, "e4m3"), ((0, 1, 2, 3), None, "float32")]
    threads = torch.get_num_threads()
    try:
        found = []
        for number in (1, 3):
            torch.set_num_threads(number)
            for dims, size, scale in kinds:
                found.append(round_blocks_compiled(x, grid, [Cut(dims, size)], scale, stochastic=True, seed=SEED))
            found.append(rotate_compiled(x, 0, 16, SEED))
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(found[:4], found[4:], strict=True):
        assert torch.equal(one, other)


def test_a_format_is_copied_with_its_kernels() -> None:
    assert copy.deepcopy(MicroscalingByKernels(RECIPES["nvfp4"])).kernels == ("cpu", "cuda")
