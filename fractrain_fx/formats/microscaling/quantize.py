"""``fake_quantize``: values after a round trip through a block format (MX, NVFP4, FP8)."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fractrain_fx.errors import InputError, near
from fractrain_fx.formats.base import Reach
from fractrain_fx.formats.bits import work_dtype
from fractrain_fx.formats.microscaling.blocks import BlockLayout, Cut
from fractrain_fx.formats.microscaling.eden import EDEN_PEAK, EDEN_TOP, round_by_eden
from fractrain_fx.formats.microscaling.elements import ELEMENTS, Grid, round_to_grid
from fractrain_fx.formats.microscaling.scales import Scale, Scales, saturated, scales
from fractrain_fx.formats.noise import dither

__all__ = ["Scaling", "fake_quantize", "reach_of_blocks", "round_blocks", "scales_of_blocks"]


def fake_quantize(
    x: Float[Tensor, "*dims"],
    element: str,
    *,
    axis: int = -1,
    block: int | Literal["row"] | None = 32,
    scale: Scale = "e8m0",
    stochastic: bool = False,
) -> Float[Tensor, "*dims"]:
    """Round ``x`` to small floating-point numbers with shared scales, and back; the gradient passes straight through.

    ``fake_quantize(x, "e4m3")`` is MXFP8, ``fake_quantize(x, "e2m1", block=16, scale="e4m3")`` is NVFP4, and
    ``fake_quantize(x, "e4m3", block=None, scale="float32")`` is FP8 with one scale for the tensor. Values are rounded
    to nearest with ties to even, subnormal ones included, and saturate at the element's largest number. Half types are
    computed in float32.

    A NaN or an infinite value makes NaN of every value that shares a scale with it: its block, or with
    ``scale="e4m3"`` the whole tensor. Finite values always stay finite. Scales are at least ``2^-127`` (``e8m0``) or
    ``2^-126`` (the others), so that values far below that become 0.

    Args:
        x: values of any shape, strides and floating-point type.
        element: ``e2m1``, ``e2m3``, ``e3m2``, ``e4m3``, ``e5m2``, or a symmetric integer: ``int4``, ``int6``, ``int8``.
        axis: the dimension that blocks lie along. In a product it is the one that is summed.
        block: how many values share a scale; the last block may be shorter. ``"row"``: all values along ``axis``.
            ``None``: all values of the tensor.
        scale: ``e8m0``: a power of two. ``e4m3``: an e4m3 number relative to one float32 scale of the tensor.
            ``float32``: the largest value becomes the element's largest number.
        stochastic: round up or down by chance, with noise from torch's default generator, so that the expected value
            of what does not saturate is ``x``.

    Returns:
        The rounded values, in the type of ``x``.

    Raises:
        InputError: an unknown ``element`` or ``scale``, a ``block`` below 1, an ``axis`` that ``x`` lacks, or an ``x``
            that is not floating-point.
    """
    for name, word, known in (("element", element, tuple(ELEMENTS)), ("scale", scale, get_args(Scale))):
        if word not in known:
            raise InputError(f"{name}={word!r} is unknown: write one of {', '.join(known)}.{near(str(word), known)}")
    whole = block is None or block == "row"
    if not whole and (isinstance(block, bool) or not isinstance(block, int) or block < 1):
        raise InputError(f"block={block!r} must be a number of values, 'row' for a whole row, or None for the tensor")
    if block is not None and not -x.ndim <= axis < x.ndim:
        raise InputError(f"axis={axis} asks for blocks along it, but the tensor has shape {tuple(x.shape)}")
    if not x.is_floating_point():
        raise InputError(f"fake_quantize rounds floating-point values, and this tensor holds {x.dtype}")
    dims = tuple(range(x.ndim)) if block is None else (axis % x.ndim,)
    cut = Cut(dims, None if whole else block)  # type: ignore[arg-type]
    rounded: Tensor = _FakeQuantize.apply(x, ELEMENTS[element].grid, cut, scale, stochastic)
    return rounded


class Scaling(NamedTuple):
    """How blocks get their scales.

    Attributes:
        kind: type of the scales.
        four_over_six: the largest value of a block becomes 6 or 4, whichever has the smaller squared error of the
            block: e2m1 has no number between them (arXiv 2512.02010, Algorithm 1). An ``e4m3`` scale of 256 belongs to
            the tensor's largest value, so that there is room for half as much again.
        stretch: the number of neighbouring blocks that share a float32 scale (``e4m3``); ``None``: all of the tensor.
        eden: the number of neighbouring blocks whose scales MS-EDEN corrects by one factor; ``None``: no correction.
    """

    kind: Scale
    four_over_six: bool = False
    stretch: int | None = None
    eden: int | None = None


def round_blocks(
    x: Float[Tensor, "*dims"],
    grid: Grid,
    blocks: BlockLayout,
    scaling: Scaling,
    *,
    stochastic: bool = False,
    seed: Int[Tensor, ""] | None = None,
) -> Float[Tensor, "*dims"]:
    """The values of blocks after rounding, outside autograd.

    Args:
        x: values.
        grid: of the element; tensors in it are shaped like what ``blocks`` gives.
        blocks: where the blocks of ``x`` lie.
        scaling: how they get their scales.
        stochastic: add noise before rounding.
        seed: of that noise; without one it is drawn from torch's default generator.
    """
    if not x.numel():
        return x
    parts = blocks.split(x.detach().to(work_dtype(x)))
    if scaling.eden is not None:
        return blocks.join(round_by_eden(parts, grid, blocks, scaling.eden, seed)).to(x.dtype)
    down, up = scales_of_blocks(parts, grid, blocks, scaling)
    scaled = parts * down
    noise = dither(scaled, seed) if stochastic else None
    return blocks.join(round_to_grid(scaled, grid, noise).mul_(up)).to(x.dtype)


def scales_of_blocks(parts: Float[Tensor, "*blocks"], grid: Grid, blocks: BlockLayout, scaling: Scaling) -> Scales:
    """The scale of each block; under MS-EDEN before it is corrected.

    Args:
        parts: what ``blocks`` gives.
        grid: of the element.
        blocks: where the blocks lie.
        scaling: how they get their scales.
    """
    largest = blocks.largest(parts)
    if scaling.eden is not None:
        return scales(largest, grid, scaling.kind, peak=EDEN_PEAK, top=EDEN_TOP)
    if not scaling.four_over_six:
        return scales(largest, grid, scaling.kind, widest=_widest(largest, blocks, scaling))
    to_six, to_four = [scales(largest, grid, scaling.kind, peak=256.0, top=top) for top in (6.0, 4.0)]
    of_six, of_four = [
        (round_to_grid(parts * scale.down, grid).mul_(scale.up) - parts).square_().sum(blocks.dims, keepdim=True)
        for scale in (to_six, to_four)
    ]
    four = of_four < of_six
    return Scales(*(torch.where(four, *pair) for pair in zip(to_four, to_six, strict=True)))


def reach_of_blocks(x: Float[Tensor, "*dims"], grid: Grid, blocks: BlockLayout, scaling: Scaling) -> Reach:
    """How far the levels of each block reach, and its scale, 0 for a block of zeros, which needs none.

    Arguments as those of :func:`round_blocks`.
    """
    parts = blocks.split(x.detach().to(work_dtype(x)))
    largest = blocks.largest(parts)
    up = scales_of_blocks(parts, grid, blocks, scaling).up

    def of_values(number: float | Tensor) -> Tensor:
        return blocks.join((up * number).expand_as(parts))

    end, least = of_values(grid.largest), of_values(grid.smallest * grid.relative / 2)
    beyond = saturated(largest, grid, scaling.kind, _widest(largest, blocks, scaling))
    return Reach((-end, end), (-least, least), up * (largest > 0), beyond)


def _widest(largest: Tensor, blocks: BlockLayout, scaling: Scaling) -> Tensor | None:
    return None if scaling.stretch is None else blocks.over_stretches(largest, scaling.stretch, "largest")


class _FakeQuantize(torch.autograd.Function):
    """The rounding, with the identity as its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: Grid, cut: Cut, scale: Scale, stochastic: bool) -> Tensor:
        rounded = round_blocks(x, grid, BlockLayout(x.shape, [cut]), Scaling(scale), stochastic=stochastic)
        return x.clone() if rounded is x else rounded

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None, None, None
