"""Recipes against arrays that the published definitions give, computed here number by number."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import Precision
from fractrain_fx.config import RECIPES
from fractrain_fx.execution.fused_op import FusedOp
from fractrain_fx.formats import Operand, get_format
from fractrain_fx.kernels.formats import MicroscalingByKernels
from fractrain_fx.passes import fused_ops
from tests.build import rewritten

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = [*(m / 8 * 2.0**-6 for m in range(8)), *((1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8))][:-1]


def nearest(x: float, values: list[float]) -> float:
    """The nearest of some positive values, ties to the even place, which is the even mantissa; with the sign of x."""
    size = min(abs(x), values[-1])
    above = min(bisect.bisect_left(values, size), len(values) - 1)
    below = max(above - 1, 0)
    if values[above] - size == size - values[below]:
        found = values[above] if above % 2 == 0 else values[below]
    else:
        found = min(values[below], values[above], key=lambda value: abs(value - size))
    return found if x >= 0 else -found


def four_over_six(block: list[float], largest: float) -> list[float]:
    """Algorithm 1 of arXiv 2512.02010 with squared errors; ``largest``: of the tensor."""
    alpha = largest / (6 * 256)
    candidates = []
    for top in (6, 4):
        scale = nearest(max(map(abs, block)) / top / alpha, E4M3) * alpha
        values = [nearest(x / scale, E2M1) * scale for x in block]
        candidates.append((sum((a - b) ** 2 for a, b in zip(values, block, strict=True)), values))
    return candidates[1][1] if candidates[1][0] < candidates[0][0] else candidates[0][1]


def test_four_over_six_keeps_what_lies_between_four_and_six() -> None:
    block = [10.0, 20.0, 30.0, 40.0]
    x = torch.tensor([[*block, *(0.0 for _ in range(12)), 1536.0, *(0.0 for _ in range(15))]])
    fmt, of = get_format("nvfp4", recipe=RECIPES["four-over-six"]), Operand("forward", "x", (1,))
    assert fmt.operand(x, 4, of)[0, :4].tolist() == block  # as 1, 2, 3, 4 with the scale 10
    usual = get_format("nvfp4", recipe=RECIPES["nvfp4"]).operand(x, 4, of)[0, :4]
    assert (usual - torch.tensor(block)).abs().max() > 2  # 30 lies between 4 and 6 in units of its scale


@pytest.mark.parametrize("by_kernels", [False, True])
def test_four_over_six_on_each_block(by_kernels: bool) -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(3)) * torch.logspace(-2, 2, 5)[:, None]
    recipe = RECIPES["four-over-six"]
    fmt = MicroscalingByKernels(recipe) if by_kernels else get_format("nvfp4", recipe=recipe)
    found = fmt.operand(x, 4, Operand("forward", "x", (1,)))
    largest = x.abs().max().item()
    blocks = [four_over_six(block.tolist(), largest) for block in x.view(-1, 16)]
    torch.testing.assert_close(found, torch.tensor(blocks).view_as(x), rtol=1e-6, atol=0)


def e4m3_of(x: Tensor) -> Tensor:
    """Round in one scale by torch's own type."""
    scale = x.abs().amax() / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize("by_kernels", [False, True])
def test_deepseeks_tiles_and_blocks(by_kernels: bool) -> None:
    recipe = RECIPES["deepseek"]
    fmt = MicroscalingByKernels(recipe) if by_kernels else get_format("fp8", recipe=recipe)
    x, w = torch.randn(160, 200) * torch.logspace(-3, 3, 200), torch.randn(130, 200)
    by_rows = torch.cat([torch.stack([e4m3_of(row) for row in part]) for part in x.split(128, 1)], 1)
    by_columns = torch.cat([torch.stack([e4m3_of(row) for row in part.t()], 1) for part in x.split(128, 0)], 0)
    squares = torch.cat([torch.cat([e4m3_of(cell) for cell in part.split(128, 1)], 1) for part in w.split(128, 0)], 0)
    cases = [
        (x, Operand("forward", "x", (1,), across=(0,)), by_rows),
        (x, Operand("input_gradient", "g", (1,), across=(0,)), by_rows),
        (x, Operand("weight_gradient", "g", (0,), across=(1,)), by_columns),
        (x, Operand("weight_gradient", "x", (0,), across=(1,)), by_columns),
        (w, Operand("forward", "w", (1,), across=(0,), weight=True), squares),
        (w, Operand("input_gradient", "w", (0,), across=(1,), weight=True), squares),
    ]
    for values, of, wanted in cases:
        torch.testing.assert_close(fmt.operand(values, 8, of), wanted, rtol=2e-7, atol=0)


@cache
def linear(recipe: str) -> FusedOp:
    """The fused op of a linear layer of 128 inputs and 256 outputs."""
    net = nn.Sequential(nn.Linear(4, 128), nn.Linear(128, 256, False), nn.Linear(256, 1))
    bits = 8 if recipe == "halo" else 4
    config: dict[str, Any] = {"format": RECIPES[recipe].format, "recipe": recipe, "precision": Precision(bits, bits)}
    model = rewritten(net, torch.randn(3, 4), method="static", **config).train()
    return fused_ops(model.graph_module)["1"]


def step(recipe: str, x: Tensor, w: Tensor, g: Tensor, seed: int = 5) -> list[Tensor]:
    """Output, input gradient and weight gradient of a linear layer."""
    op, (x, w) = linear(recipe), (each.clone().requires_grad_() for each in (x, w))
    width, unused = torch.tensor(8 if recipe == "halo" else 4), op.plan.first.fmt.activation_range(x)
    out = op((width, width, width), None, (unused, None), torch.tensor(seed), x, w, None)
    return [out.detach(), *torch.autograd.grad(out, (x, w), g)]


def by_blocks(x: Tensor, size: int, rounded: Callable[[list[float], float], list[float]]) -> Tensor:
    """Blocks of 16 of each row, with the largest value of their stretch of ``size`` values."""
    found = []
    for stretch in x.reshape(-1, size):
        largest = stretch.abs().max().item()
        found += [rounded(block.tolist(), largest) for block in stretch.view(-1, 16)]
    return torch.tensor(found).view_as(x)


def nvfp4(block: list[float], largest: float) -> list[float]:
    """Two scales, of the block and of what it shares a float32 scale with; both so that the largest value becomes 6."""
    if not any(block):
        return block
    outer = largest / 448 / 6
    scale = nearest(max(map(abs, block)) / outer / 6, E4M3) * outer
    return [nearest(x / scale, E2M1) * scale for x in block]


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x, w, g = (torch.randn(shape, generator=generator) for shape in ((256, 128), (256, 128), (256, 256)))
    return x * torch.logspace(-1, 1, 128), w / 8, g


def errors_of_means(recipe: str, *wanted: tuple[Tensor, Tensor]) -> list[list[float]]:
    """Errors of both gradients after averaging over seeds, in units of what independent errors would leave."""
    x, w, g = inputs()
    seeds = 40
    steps = list(zip(*(step(recipe, x, w, g, seed)[1:] for seed in range(seeds)), strict=True))

    def error(gradients: tuple[Tensor, ...], exact: Tensor) -> float:
        alone = torch.stack([(each - exact).norm() for each in gradients]).mean()
        return ((torch.stack(gradients).mean(0) - exact).norm() / alone).item() * math.sqrt(seeds)

    return [[error(*each) for each in zip(steps, exact, strict=True)] for exact in wanted]


def test_tetrajet_has_a_float32_scale_for_each_128_values() -> None:
    x, w, g = inputs()
    rounded = [by_blocks(each, 128, nvfp4) for each in (x, w)]
    torch.testing.assert_close(step("tetrajet-v2", x, w, g)[0], rounded[0] @ rounded[1].t(), rtol=1e-5, atol=1e-4)
    fmt, of = get_format("nvfp4", recipe=RECIPES["tetrajet-v2"]), Operand("forward", "x", (1,))
    torch.testing.assert_close(fmt.operand(x, 4, of), rounded[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(fmt.operand(x.t(), 4, Operand("forward", "w", (0,))), rounded[0].t(), rtol=1e-6, atol=0)
    shorter = fmt.operand(x[:, :72], 4, of)  # the last stretch and the last block are shorter
    filled = torch.cat([x[:, :72], torch.zeros(256, 56)], 1)
    torch.testing.assert_close(shorter, by_blocks(filled, 128, nvfp4)[:, :72], rtol=1e-6, atol=0)
    large = torch.cat([x, 1e4 * x], 1)  # an outlier does not reach the stretch beside its own
    assert torch.equal(fmt.operand(large, 4, of)[:, :128], fmt.operand(x, 4, of))


def test_tetrajets_gradients_are_those_of_what_forward_multiplied() -> None:
    x, w, g = inputs()
    rounded = [by_blocks(each, 128, nvfp4) for each in (x, w)]
    exact, unrounded = (g @ rounded[1], g.t() @ rounded[0]), (g @ w, g.t() @ x)
    of_exact, of_unrounded = errors_of_means("tetrajet-v2", exact, unrounded)
    assert max(of_exact) < 1.3 and min(of_unrounded) > 1.7


def eden(stretch: Tensor, largest: float) -> tuple[list[list[float]], list[float], float]:
    """The authors' definition of MS-EDEN: e2m1 numbers, scales before they are rounded by chance, the outer scale."""
    top = 6 / (17 / 16 * 0.93)
    outer = largest / 255.99 / top
    scales = [nearest(max(map(abs, block)) / top / outer, E4M3) for block in stretch.view(-1, 16).tolist()]
    scaled = [
        [x / (scale * outer) for x in block] for block, scale in zip(stretch.view(-1, 16).tolist(), scales, strict=True)
    ]
    numbers = [[nearest(x, E2M1) for x in block] for block in scaled]
    own = sum(x * x for block in scaled for x in block)
    across = sum(x * q for a, b in zip(scaled, numbers, strict=True) for x, q in zip(a, b, strict=True))
    return numbers, [scale * own / across for scale in scales], outer


def test_quartets_scales_are_corrected_for_each_rotation() -> None:
    x = inputs()[0][:5]
    fmt, of = get_format("nvfp4", recipe=RECIPES["quartet-ii"]), Operand("input_gradient", "g", (1,))
    seeds = 400
    found = torch.stack([fmt.operand(x, 4, of, seed=torch.tensor(seed)) for seed in range(seeds)])
    for row, values in zip(x, found.unbind(1), strict=True):
        numbers, scales, outer = eden(row, x.abs().max().item())
        blocks = values.view(seeds, 8, 16)
        for index, (block, scale) in enumerate(zip(numbers, scales, strict=True)):
            above = bisect.bisect_left(E4M3, scale)
            low, high = E4M3[above - 1] * outer, E4M3[above] * outer
            exact = torch.tensor(block)
            taken = (blocks[:, index] * exact).sum(1) / exact.square().sum()
            torch.testing.assert_close(blocks[:, index], taken[:, None] * exact, rtol=1e-5, atol=0)
            assert ((taken / low - 1).abs().minimum((taken / high - 1).abs()) < 1e-5).all()
            # The standard deviation of the mean is at most half the distance over the root of the number of seeds.
            assert abs(taken.mean().item() - scale * outer) < 4 * (high - low) / 2 / math.sqrt(seeds)


def test_quartets_gradients_are_unbiased_at_half_the_error_of_rounding_by_chance() -> None:
    x, w, g = inputs()
    largest = x.abs().max().item(), w.abs().max().item()
    rounded = [
        by_blocks(each, 16, lambda block, _, whole=whole: four_over_six(block, whole))  # type: ignore[misc]
        for each, whole in zip((x, w), largest, strict=True)
    ]
    torch.testing.assert_close(step("quartet-ii", x, w, g)[0], rounded[0] @ rounded[1].t(), rtol=1e-5, atol=1e-4)
    (errors,) = errors_of_means("quartet-ii", (g @ rounded[1], g.t() @ rounded[0]))
    assert max(errors) < 1.3
    of, seed = Operand("input_gradient", "g", (1,)), torch.tensor(3)
    squares = [
        (get_format("nvfp4", recipe=RECIPES[name]).operand(g, 4, of, seed=seed) - g).square().mean()
        for name in ("quartet-ii", "tetrajet-v2")
    ]
    assert squares[0] < 0.6 * squares[1]


def hadamard(size: int) -> Tensor:
    signs = [[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    return torch.tensor(signs) / math.sqrt(size)


def int8(x: Tensor) -> Tensor:
    scale = x.abs().max() / 127
    return (x / scale).round() * scale


def test_halo_turns_inputs_forward_and_rows_backward() -> None:
    x, w, g = inputs()
    turn = hadamard(128)
    out, of_x, of_w = step("halo", x, w, g)
    torch.testing.assert_close(out, int8(x @ turn) @ int8(w @ turn).t(), rtol=1e-4, atol=1e-3)
    rows = torch.block_diag(turn, turn)
    torch.testing.assert_close(of_x, rows @ (int8(rows @ g) @ int8(w)), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(of_w, int8(g).t() @ int8(x), rtol=1e-4, atol=1e-2)
