"""Formats whose functions are kernels where these take the values, and the formats' own plain functions elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fractrain_fx.config import BLOCK_FORMATS, FracConfig, Recipe, usual_recipe
from fractrain_fx.config.affine import AffineConfig
from fractrain_fx.formats import AffineFormat, Format, MicroscalingFormat, ValueRange, get_format
from fractrain_fx.formats.affine.format import range_shape
from fractrain_fx.formats.base import Bits, Operand, Seed, Values
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.formats.bits import as_bits, known_bits, only_unrounded, readable
from fractrain_fx.formats.counts import Counts
from fractrain_fx.formats.microscaling.blocks import Cut
from fractrain_fx.formats.microscaling.elements import Grid
from fractrain_fx.formats.microscaling.format import scale_of_group
from fractrain_fx.formats.microscaling.scales import Scale
from fractrain_fx.formats.noise import noise_number
from fractrain_fx.formats.running import RangeBuffers
from fractrain_fx.kernels import affine, graph_ops, microscaling
from fractrain_fx.kernels.triton import (
    gains_by_triton,
    has_triton,
    measure_by_triton,
    round_blocks_by_triton,
    round_by_triton,
    round_rows_by_triton,
)
from fractrain_fx.native.choice import kernel_devices

__all__ = ["AffineByKernels", "MicroscalingByKernels", "format_by_kernels"]


def format_by_kernels(config: FracConfig, name: str, recipe: Recipe | None = None) -> Format:
    """The format of a name in a model, by the kernels that the model's backend stands for, if it has any."""
    devices = kernel_devices(config)
    if not devices or not config.has_kernels(name):
        return get_format(name, affine=config.affine, recipe=recipe)
    if name in BLOCK_FORMATS:
        return MicroscalingByKernels(recipe or usual_recipe(name), devices)
    return AffineByKernels(config.affine, devices)


class AffineByKernels(AffineFormat):
    """The affine format: in C++ the formula's numbers with noise that is a hash, in Triton those of plain operations.

    ``kernels`` are the types of the devices whose kernels may be called.
    """

    def __init__(self, affine: AffineConfig = AffineConfig(), kernels: tuple[str, ...] = ("cpu", "cuda")) -> None:
        super().__init__(affine)
        self.kernels = kernels

    def measure(self, x: Values, dim: int | None = None) -> ValueRange:
        x = x.detach() if x.requires_grad else x
        if "cpu" in self.kernels and affine.has_kernels(x) and (dim is None or dim % x.ndim == 0):
            return ValueRange(*affine.measure_compiled(x, range_shape(x, dim)), True)
        if "cuda" in self.kernels and has_triton(x):
            return ValueRange(*measure_by_triton(x, dim, range_shape(x, dim)), True)
        return super().measure(x, dim)

    def activation_gains(
        self,
        x: Float[Tensor, "batch ..."],
        g: Float[Tensor, "batch ..."],
        bits: Sequence[int],
        within: ValueRange,
        squared: bool = False,
    ) -> Float[Tensor, "batch options"]:
        if within.lo.ndim:
            if x.dtype != within.lo.dtype:  # Q(x) is rounded to the type of x, which has no scale of its own
                return super().activation_gains(x, g, bits, within, squared)
            # Kernels read one range: here each sample's values lie in 0..1, and its gradient takes the width.
            width = torch.where(within.span > 0, within.span, 1.0)
            x, g = (x - within.lo) / width, g * width
            within = ValueRange(width.new_zeros(()), width.new_ones(()), within.measured_here)
        if "cpu" in self.kernels:
            single, of_single = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor for tensor in (x, g))
            if single.dtype == of_single.dtype and affine.has_gains(single, within.lo):
                return affine.gains_compiled(single, of_single, bits, within, squared=squared, twice=single is not x)
        if "cuda" in self.kernels and has_triton(x, *within[:2]):
            return gains_by_triton(x, g, bits, within, squared=squared)
        return super().activation_gains(x, g, bits, within, squared)

    def output_gradient(
        self,
        g: Values,
        bits: Int[Tensor, "*bits"],
        *,
        axis: BatchAxis,
        seed: Seed = None,
        out: Tensor | None = None,
    ) -> Values:
        if "cuda" in self.kernels and self.gradient_grid == "range" and has_triton(g):
            within = self.gradient_range(g, bits, axis)
            rounded = round_by_triton(g, bits, within, noise=noise_number(True, seed), erase=True)
            if rounded is not None:
                return rounded
        return super().output_gradient(g, bits, axis=axis, seed=seed, out=out)

    def moved_range(self, x: Values, running: RangeBuffers, weight: float) -> ValueRange:
        if "cuda" in self.kernels and has_triton(x, *running[:2]):
            return ValueRange(*measure_by_triton(x, None, (), running, weight), True)
        return super().moved_range(x, running, weight)

    def weight(
        self, w: Values, bits: Bits, *, dim: int | None, within: ValueRange | None = None, out: Tensor | None = None
    ) -> Values:
        bits = as_bits(bits, w)
        if within is None and "cuda" in self.kernels and has_triton(w):
            rounded = round_rows_by_triton(w, bits, dim)
            if rounded is not None:
                return rounded[0]
        return super().weight(w, bits, dim=dim, within=within, out=out)

    def codes(self, x: Values, bits: Int[Tensor, "*bits"], within: ValueRange) -> Int[Tensor, "*dims"]:
        if "cpu" in self.kernels and affine.has_kernels(x, within.lo):
            coded = affine.coded_compiled(x, bits, within)
            if coded is not None:
                return coded[0]
        return super().codes(x, bits, within)

    def _round(
        self,
        x: Tensor,
        bits: Tensor,
        within: ValueRange,
        *,
        stochastic: bool = False,
        seed: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        rounded: Tensor | None = None
        if not readable(x):
            if "cuda" in self.kernels and has_triton(x, *within[:2]):
                rounded = round_by_triton(x, bits, within, noise=noise_number(stochastic, seed))
        elif "cpu" in self.kernels and within.lo.dtype == torch.float32:
            if x.dtype == torch.float32:
                if affine.has_kernels(x, within.lo):
                    rounded = affine.round_compiled(x, bits, within, stochastic=stochastic, seed=seed, out=out)
            elif only_unrounded(bits):
                return x
            elif affine.has_kernels(work := x.to(torch.float32), within.lo):
                single = affine.round_compiled(work, bits, within, stochastic=stochastic, seed=seed, out=work)
                rounded = None if single is None else single.to(x.dtype)
        if rounded is not None:
            return rounded
        return super()._round(x, bits, within, stochastic=stochastic, seed=seed, out=out)


class MicroscalingByKernels(MicroscalingFormat):
    """The block formats: by C++ where one width holds for all values, in compiled graphs too; by Triton in eager mode.

    ``kernels`` are the types of the devices whose kernels may be called.
    """

    def __init__(self, recipe: Recipe, kernels: tuple[str, ...] = ("cpu", "cuda")) -> None:
        super().__init__(recipe)
        self.kernels = kernels

    def _rounded(
        self,
        x: Tensor,
        bits: Tensor,
        elements: Mapping[int, Grid],
        cuts: Sequence[Cut],
        scale: Scale,
        of: Operand,
        noise: Mapping[str, Any],
    ) -> Tensor:
        width, matrices = known_bits(bits), not of.positions
        if self._scales_plainly(x, cuts, scale, of):
            return super()._rounded(x, bits, elements, cuts, scale, of, noise)
        if "cuda" in self.kernels and has_triton(x):
            seed = noise_number(noise["stochastic"], noise["seed"])
            rounded = round_blocks_by_triton(x, bits, elements, cuts, scale, noise=seed)
            if rounded is not None:
                return rounded
        if "cpu" in self.kernels:
            if width is not None and microscaling.has_kernels(x):
                return microscaling.round_blocks_compiled(x, elements[width], cuts, scale, **noise, matrices=matrices)
            if graph_ops.has_ops(x, bits):
                return graph_ops.round_in_graph(x, bits, elements, cuts, scale, **noise, matrices=matrices)
        return super()._rounded(x, bits, elements, cuts, scale, of, noise)

    def _scales_plainly(self, x: Tensor, cuts: Sequence[Cut], scale: Scale, of: Operand) -> bool:
        """Whether the kernels lack the scales of an operand, so that plain operations compute them."""
        how = self._how(of)
        return scale_of_group(x, cuts, of) or how.scales_apart or (scale == "e4m3" and how.block is not None)

    def count(self, x: Values, rounded: Values, bits: Int[Tensor, "*bits"], of: Operand) -> Counts | None:
        bits = self._widened(bits, of)
        width, elements = known_bits(bits), self._elements[of.product, of.tensor]
        if "cpu" not in self.kernels or width not in elements or not microscaling.has_kernels(x):
            return None
        cuts, scale = self._cuts(x, of, self._how(of))
        if self._scales_plainly(x, cuts, scale, of):
            return None
        return microscaling.count_blocks_compiled(x, rounded, elements[width], cuts, scale)

    def _rotated(
        self,
        first: Tensor,
        second: Tensor,
        dims: tuple[int, int],
        width: int,
        bits: Sequence[Tensor],
        seed: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        pair = first, second
        if "cpu" not in self.kernels or seed is None:
            return super()._rotated(first, second, dims, width, bits, seed)
        if all(graph_ops.has_ops(x, widths) for x in pair for widths in bits):
            return (
                graph_ops.rotate_in_graph(first, bits, dims[0], width, seed),
                graph_ops.rotate_in_graph(second, bits, dims[1], width, seed),
            )
        if all(known_bits(widths) is not None for widths in bits) and all(map(microscaling.has_kernels, pair)):
            return (
                microscaling.rotate_compiled(first, dims[0], width, seed),
                microscaling.rotate_compiled(second, dims[1], width, seed),
            )
        return super()._rotated(first, second, dims, width, bits, seed)
