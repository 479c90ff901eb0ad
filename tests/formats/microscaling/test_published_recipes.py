"""Recipes against arrays that the published definitions give, computed here number by number."""

from __future__ import annotations

import bisect

import pytest
import torch
from torch import Tensor

from fractrain_fx.config import RECIPES
from fractrain_fx.formats import Operand, get_format
from fractrain_fx.kernels.formats import MicroscalingByKernels

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
