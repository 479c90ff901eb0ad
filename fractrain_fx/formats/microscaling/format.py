"""The formats ``mx``, ``nvfp4``, ``fp8`` and ``int``: how each operand of a product is rounded, by recipe and bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from fractrain_fx.config.precision import FLOAT_BITS
from fractrain_fx.config.products import PRODUCTS, OperandRecipe, ProductName, Recipe
from fractrain_fx.config.recipes import elements_of
from fractrain_fx.errors import InputError
from fractrain_fx.formats.base import Bits, Format, Operand, Reach, Seed, ValueRange, Values
from fractrain_fx.formats.bits import as_bits, known_bits, unrounded, work_dtype
from fractrain_fx.formats.microscaling.blocks import BlockLayout, Cut, GroupedRows
from fractrain_fx.formats.microscaling.elements import ELEMENTS, HALF_BITS, Grid, to_bfloat16
from fractrain_fx.formats.microscaling.hadamard import needs_rotation, rotate, rotation_at
from fractrain_fx.formats.microscaling.quantize import Scaling, reach_of_blocks, round_blocks, scales_of_blocks
from fractrain_fx.formats.microscaling.scales import Scale
from fractrain_fx.formats.noise import APART
from fractrain_fx.formats.per_product import PerProductFormat

__all__ = ["MicroscalingFormat", "block_format", "scale_of_group"]

# Values of a block, and the type of its scale; `None`: as many as the recipe says.
_SHARED: dict[str, tuple[int | None, Scale]] = {
    "mx": (32, "e8m0"),
    "nvfp4": (16, "e4m3"),
    "fp8": (None, "float32"),
    "int": (None, "float32"),
}
_SIDE = 32  # of a square block of integers, and a multiple of every other block's length

# The tensors that each product multiplies.
_OPERANDS: dict[ProductName, str] = {"forward": "xw", "input_gradient": "gw", "weight_gradient": "gx"}


class MicroscalingFormat(PerProductFormat):
    """Small numbers in blocks along the axis that a product sums over, each block with a scale.

    A tensor is rounded anew for each product that reads it, and each product may have a format of its own. 16 bits are
    bfloat16, without scales.

    Args:
        recipe: how the operands of each product are rounded.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.name: str = recipe.format
        self.recipe: Recipe = recipe
        self.by_product = recipe.by_product
        self._formats = dict(zip(PRODUCTS, recipe.formats, strict=True))
        mixed = [length or 1 for product in recipe.products for length in (product.hadamard, product.rows)]
        blocks = [operand.block or 1 for product in recipe.products for operand in (product.first, product.second)]
        self.group_alignment = max(_SIDE, *blocks, *mixed)
        self._elements = {
            (product, tensor): self._elements_of(product, tensor) for product in PRODUCTS for tensor in "xwg"
        }

    def operand(self, x: Values, bits: Bits, of: Operand, *, seed: Seed = None) -> Values:
        """Round an operand of a product.

        Values of samples that have bits of their own are rounded as the whole tensor would be at these bits.

        Raises:
            InputError: ``bits`` that the format lacks, where that can be told at no cost.
        """
        if not x.numel():
            return x
        bits = self._widened(as_bits(bits, x), of)
        how, width = self._how(of), known_bits(bits)
        elements = self._elements[of.product, of.tensor]
        if width in (0, FLOAT_BITS):
            return x
        if width == HALF_BITS:
            return to_bfloat16(x)
        if width is not None and width not in elements:
            name = self._formats[of.product]
            raise InputError(f"bits={width} is not a width of format {name!r}: it has {[*elements, 16, 32]}")
        cuts, scale = self._cuts(x, of, how)
        # A gradient in square blocks is rounded once for both of its products.
        if seed is not None and of.product == "weight_gradient" and not how.square:
            seed = seed + APART
        noise: dict[str, Any] = {"stochastic": how.stochastic, "seed": seed}
        return self._rounded(x, bits, elements, cuts, scale, of, noise)

    def reach(self, x: Values, bits: Int[Tensor, "*bits"], of: Operand, within: ValueRange | None) -> Reach:
        bits = self._widened(bits, of)
        elements, width = self._elements[of.product, of.tensor], known_bits(bits)
        if not x.numel() or width in (0, HALF_BITS, FLOAT_BITS):
            return Reach()
        cuts, scale = self._cuts(x, of, self._how(of))
        blocks = _blocks(x, cuts, of)
        grid = elements[width] if width is not None else _by_bits(elements, _spread(bits, x, blocks))
        reach = reach_of_blocks(x, grid, blocks, self._scaling(scale, of))
        if width is not None or reach.ends is None or reach.zero is None:
            return reach
        rounds = (bits != 0) & (bits != HALF_BITS) & (bits != FLOAT_BITS)
        (low, high), (least, most) = reach.ends, reach.zero
        ends = torch.where(rounds, low, -torch.inf), torch.where(rounds, high, torch.inf)
        zero = torch.where(rounds, least, torch.nan), torch.where(rounds, most, torch.nan)
        return reach._replace(ends=ends, zero=zero)

    def _widened(self, bits: Tensor, of: Operand) -> Tensor:
        """The bits of an operand: at least 16 in a product that the recipe leaves in bfloat16."""
        if not getattr(self.recipe, of.product).bfloat16:
            return bits
        return torch.where(bits == 0, bits, bits.clamp(min=HALF_BITS))

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
        """Round to small numbers, in blocks with scales."""
        width, blocks = known_bits(bits), _blocks(x, cuts, of)
        grid = elements[width] if width is not None else _by_bits(elements, _spread(bits, x, blocks))
        rounded = round_blocks(x, grid, blocks, self._scaling(scale, of), **noise)
        if width is not None:
            return rounded
        return unrounded(bits, x, torch.where(bits == HALF_BITS, to_bfloat16(x), rounded))

    def scales_of(self, x: Values, bits: int, of: Operand) -> Values:
        """The scale that each value of an operand is rounded with, for another library's form of the same numbers."""
        cuts, kind = self._cuts(x, of, self._how(of))
        blocks = _blocks(x, cuts, of)
        parts = blocks.split(x.detach().to(work_dtype(x)))
        grid = self._elements[of.product, of.tensor][bits]
        up = scales_of_blocks(parts, grid, blocks, self._scaling(kind, of)).up
        return blocks.join(up.expand_as(parts).contiguous())

    def transform(
        self, product: str, first: Values, second: Values, dims: tuple[int, int], bits: tuple[Bits, Bits], seed: Seed
    ) -> tuple[Values, Values]:
        """The Hadamard transform of the recipe, where one of both operands has few bits."""
        width = getattr(self.recipe, product).hadamard
        few = [as_bits(widths, first) for widths in bits]
        if width is None or not needs_rotation(few):
            return first, second
        while width // 2 >= first.shape[dims[0]] and width > 1:
            width //= 2
        return self._rotated(first, second, dims, width, few, seed)

    def _rotated(
        self,
        first: Tensor,
        second: Tensor,
        dims: tuple[int, int],
        width: int,
        bits: Sequence[Tensor],
        seed: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Both operands after the transform, or as they are where both have many bits."""
        matrix = rotation_at(bits, width, seed, first.new_empty(0, dtype=work_dtype(first)))
        first, second = [rotate(x.to(matrix.dtype), dim, matrix) for x, dim in zip((first, second), dims, strict=True)]
        return first, second

    def products(self) -> dict[str, str]:
        """For each product, how its two operands are rounded, in words."""
        texts = {}
        for product, tensors in _OPERANDS.items():
            words = [f"{tensor} {self._words(product, tensor)}" for tensor in tensors]
            how = getattr(self.recipe, product)
            if how.hadamard is not None:
                signs = "a" if product == "forward" else "a random"
                words.append(f"both after {signs} Hadamard transform of {how.hadamard}")
            if how.rows is not None:
                words.append(f"g after a Hadamard transform of {how.rows} rows, which the result undoes")
            if self.by_product and product != "forward":
                words.append("both at the backward bits")
            if how.bfloat16:
                words = [f"{tensor} bfloat16" for tensor in tensors]
            texts[product.replace("_", " ")] = ", ".join(words)
        return texts

    def _words(self, product: ProductName, tensor: str) -> str:
        how, name = self._of(product, tensor), self._formats[product]
        elements = elements_of(name, how, gradient=tensor == "g")
        size = f" of {how.block}" if how.block and name != "nvfp4" else ""
        details = ["as forward rounded it"] if how.again else []
        details += [*(["stochastic"] if how.stochastic else []), *(["four over six"] if how.four_over_six else [])]
        details += ["MS-EDEN"] if how.eden else []
        details += [f"square blocks{size}"] if how.square else [f"blocks{size}"] if size else []
        details += ["a scale a row"] if how.per_row else []
        details += [f"a float32 scale for {how.block}"] if how.block and name == "nvfp4" else []
        return f"{name} {'/'.join(elements.values())}" + (f" ({', '.join(details)})" if details else "")

    def _of(self, product: ProductName, tensor: str) -> OperandRecipe:
        operands = getattr(self.recipe, product)
        first = "x" if product == "forward" else "g"
        operand: OperandRecipe = operands.first if tensor == first else operands.second
        return operand

    def _elements_of(self, product: ProductName, tensor: str) -> dict[int, Grid]:
        """The element that each width selects for an operand."""
        names = elements_of(self._formats[product], self._of(product, tensor), gradient=tensor == "g")
        return {bits: ELEMENTS[name].grid for bits, name in names.items()}

    def _how(self, of: Operand) -> OperandRecipe:
        return self._of(of.product, of.tensor)

    def _scaling(self, kind: Scale, of: Operand) -> Scaling:
        """How the blocks of an operand get their scales."""
        how = self._how(of)
        if kind != "e4m3":
            return Scaling(kind)
        size, mixed = _SHARED["nvfp4"][0], getattr(self.recipe, of.product).hadamard
        assert size is not None
        return Scaling(
            kind, how.four_over_six, how.block and how.block // size, max(mixed // size, 1) if how.eden else None
        )

    def _cuts(self, x: Tensor, of: Operand, how: OperandRecipe) -> tuple[list[Cut], Scale]:
        size, scale = _SHARED[self._formats[of.product]]
        square = how.square and bool(of.across) and not set(of.across) & set(of.along)
        if size is None:
            size = how.block or (_SIDE if how.square else None)
        if size is None:
            dims = of.summed if how.per_row else tuple(range(x.ndim))
            return [Cut(dims, None)], scale
        cuts = [Cut(of.along, size)]
        if square:
            cuts.append(Cut(of.across, size))
        return cuts, scale


def block_format(fmt: Format) -> MicroscalingFormat | None:
    """The format, if it rounds in blocks; ``None`` if it has no blocks."""
    return fmt if isinstance(fmt, MicroscalingFormat) else None


def _blocks(x: Tensor, cuts: Sequence[Cut], of: Operand) -> BlockLayout:
    if of.group_ends is not None and scale_of_group(x, cuts, of):
        return GroupedRows(x.shape, cuts, of.group_ends)
    return BlockLayout(x.shape, cuts)


def scale_of_group(x: Tensor, cuts: Sequence[Cut], of: Operand) -> bool:
    """Whether each column has a scale for each group of rows."""
    return of.group_ends is not None and cuts[0].size is None and len(cuts[0].dims) < x.ndim


def _spread(bits: Tensor, x: Tensor, blocks: BlockLayout) -> Tensor:
    """Bits of samples in the shape that the blocks of ``x`` have; one width as it is."""
    return bits if bits.ndim == 0 else blocks.split(bits.expand(x.shape))


def _by_bits(elements: Mapping[int, Grid], bits: Tensor) -> Grid:
    """The grid of each width, where the widths are data; those of other widths mean nothing."""

    def chosen(field: int) -> Tensor:
        first, *others = elements.items()
        numbers = torch.zeros_like(bits) + first[1][field]
        for width, grid in others:
            numbers = torch.where(bits == width, grid[field], numbers)
        return numbers

    return Grid(*(chosen(field) for field in range(len(Grid._fields))))
