"""The protocol of number formats: how they round activations, weights and output gradients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fractrain_fx.config.products import ProductName, Recipe
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.formats.bits import known_bits, of_options, put_where, sum_of_samples, work_dtype
from fractrain_fx.formats.counts import Counts
from fractrain_fx.formats.running import RangeBuffers, move_range

__all__ = ["Bits", "Format", "Operand", "Reach", "Seed", "ValueRange", "Values"]

Bits = int | Int[Tensor, "*bits"]
Values = Float[Tensor, "*dims"]
Seed = Int[Tensor, ""] | None


class ValueRange(NamedTuple):
    """The range that values are rounded in.

    Attributes:
        lo: low end, in float32 or wider: 0-dim, or of a shape that broadcasts against the values.
        span: width of the range, shaped like ``lo``.
        measured_here: whether it was measured on the values that are rounded in it. Then none of them lies outside,
            and a NaN or infinite value makes the range itself NaN or infinite.
    """

    lo: Float[Tensor, "*ends"]
    span: Float[Tensor, "*ends"]
    measured_here: bool = False


class Operand(NamedTuple):
    """One of the six operands of an op's three products.

    Attributes:
        product: ``forward``, ``input_gradient`` (of ``g`` and ``w``) or ``weight_gradient`` (of ``g`` and ``x``).
        tensor: ``x``, ``w`` or ``g``. A product of two activations has no weight; ``w`` is then its second factor.
        along: the dimensions that the product sums over, counted from the front, in the order of the sum.
        samples: where the samples lie in an output gradient.
        channel: the dimension of a weight that holds its output channels; ``None`` for all else, and for a vector.
        across: the dimensions that the other product which reads the tensor sums over.
        weight: whether it is a weight.
        positions: dimensions of a convolution's positions and window: each output reads several of them.
        group_ends: where each group of rows ends, if the product sums over the rows of each group apart.
    """

    product: ProductName
    tensor: Literal["x", "w", "g"]
    along: tuple[int, ...]
    samples: BatchAxis | None = None
    channel: int | None = None
    across: tuple[int, ...] = ()
    weight: bool = False
    positions: tuple[int, ...] = ()
    group_ends: Int[Tensor, " groups"] | None = None

    @property
    def summed(self) -> tuple[int, ...]:
        """The dimensions along which a scale has to be constant to factor out of the sum."""
        return tuple(sorted({*self.along, *self.positions}))


class Reach(NamedTuple):
    """How far the levels of a rounded operand reach. Its tensors broadcast against the values, or are ``None``.

    Attributes:
        ends: the lowest and the highest level. Values beyond them are clipped. ``None`` if no value lies beyond.
        zero: the lowest and the highest value that rounding to nearest takes to the level of 0. ``None``: to 0 itself.
        scales: the factor of each block, if blocks share factors; 0 for a block without one.
        saturated: whether each of these is smaller than its type can hold, or larger.
    """

    ends: tuple[Tensor, Tensor] | None = None
    zero: tuple[Tensor, Tensor] | None = None
    scales: Tensor | None = None
    saturated: Tensor | None = None


class Format(Protocol):
    """Pure functions from a tensor and its bits to the rounded tensor, of equal shape and type, outside autograd.

    ``bits`` is an int, a 0-dim tensor or a tensor that broadcasts against the values (bits of each sample). No function
    branches on the content of such a tensor, because a compiled graph cannot. 0 and 32 bits leave the values as they
    are, bit for bit. A NaN or infinite value makes a NaN; finite values never do. Results may be the input itself, or
    lie in ``out``: memory of the input's shape, in the type that the format computes in.

    The derivative of each rounding is a separate function, so that a fused op can apply it without having recorded
    the rounding. Gradients pass straight through unless a format says otherwise.

    Attributes:
        name: the format's name in a configuration.
        per_product: whether the products that read a tensor need it rounded differently. If not, it is rounded once
            for all of them.
        by_product: whether both operands of a gradient product have the backward bits (``Recipe.by_product``).
        has_codes: whether rounded values are ``scale * code + zero`` with whole codes and one range for a tensor, or
            for each output channel of a weight.
        by_sample: whether each sample of an activation or gradient has a range of its own.
        kernels: types of the devices on which kernels compute what these functions give.
        recipe: how a block format rounds the operands of each product; ``None`` for other formats.
        group_alignment: groups of rows of a grouped product begin at multiples of it, so that no block of values that
            share a scale, and no transform, reaches into two groups.
    """

    name: str
    per_product: bool = False
    by_product: bool = False
    has_codes: bool = False
    by_sample: bool = False
    kernels: tuple[str, ...] = ()
    recipe: Recipe | None = None
    group_alignment: int = 1

    def operand(self, x: Values, bits: Bits, of: Operand, *, seed: Seed = None) -> Values:
        """Round an operand of a product: the same for every product, unless the format is ``per_product``."""
        if of.samples is not None:
            return self.gradient(x, bits, axis=of.samples, seed=seed)
        if of.weight:
            return self.weight(x, bits, dim=of.channel)
        return self.activation(x, bits, self.activation_range(x))

    def products(self) -> dict[str, str]:
        """For each product, how its operands are rounded, in words; nothing where all products get the same."""
        return {}

    def transform(
        self, product: str, first: Values, second: Values, dims: tuple[int, int], bits: tuple[Bits, Bits], seed: Seed
    ) -> tuple[Values, Values]:
        """Both operands of a product before they are rounded, changed alike so that the product stays the same.

        Args:
            product: as :class:`Operand` names it.
            first: its first operand.
            second: its second operand.
            dims: in both, one dimension that the product sums over.
            bits: of both.
            seed: of what is random about it; ``None`` in the forward product, where nothing is.
        """
        return first, second

    def range_of(self, x: Values, of: Operand) -> ValueRange | None:
        """The ranges that :meth:`operand` measures, which broadcast against ``x``; ``None`` for other formats."""
        return None

    def reach(self, x: Values, bits: Int[Tensor, "*bits"], of: Operand, within: ValueRange | None) -> Reach:
        """How far the levels of a rounded operand reach; ``within`` is the range that it is rounded in, if it has one.

        By default a value becomes 0 only if it is exactly 0 afterwards, and none is clipped.
        """
        return Reach()

    def count(self, x: Values, rounded: Values, bits: Int[Tensor, "*bits"], of: Operand) -> Counts | None:
        """Count what rounding has made of an operand, if a kernel does so in one sweep."""
        return None

    @abstractmethod
    def activation_range(self, x: Values) -> ValueRange:
        """The range of a batch, in float32 or wider. Evaluation averages it over training steps."""
        ...

    def moved_range(self, x: Values, running: RangeBuffers, weight: float) -> ValueRange:
        """The range of a batch, to which a running range moves by this weight."""
        within = self.activation_range(x)
        move_range(running, within.lo, within.span, weight)
        return within

    def sample_ranges(self, x: Values, axis: BatchAxis) -> ValueRange:
        """The ranges of the samples along ``axis``, which broadcast against ``x``; one for all by default."""
        return self.activation_range(x)

    def needed_bits(self, g: Values, bits: Int[Tensor, ""], axis: BatchAxis) -> Float[Tensor, " samples"]:
        """The bits that number the levels of each sample's gradient; by default the given ones."""
        return bits.expand(1)

    @abstractmethod
    def activation(self, x: Values, bits: Bits, within: ValueRange, *, out: Tensor | None = None) -> Values:
        """Round ``x`` in a range."""
        ...

    def activation_gradient(self, x: Values, g: Values, bits: Bits) -> Values:
        """The gradient of ``x`` from ``g``, the gradient of the rounded activation."""
        return g

    def activation_gains(
        self,
        x: Float[Tensor, "batch ..."],
        g: Float[Tensor, "batch ..."],
        bits: Sequence[int],
        within: ValueRange,
        squared: bool = False,
    ) -> Float[Tensor, "batch options"]:
        """For each of several bits, the sum over each sample of ``g * (Q(x) - x)``, or of its squares.

        It is 0 for 0 and 32 bits.

        Args:
            x: values, samples first.
            g: gradient of the rounded values.
            bits: of each option.
            within: the range in which ``x`` is rounded; its ends broadcast against ``x``.
            squared: sum the squares.
        """
        dtype = work_dtype(x)

        def gain(width: int) -> Tensor:
            parts = (self.activation(x, width, within).to(dtype) - x) * g
            return sum_of_samples(parts.flatten(1), squared)

        # One option after the other, so that one copy of x lives at a time, and without a generator: torch.compile may
        # begin to trace a backward pass twice, and fails on generators of the first time.
        return of_options(bits, lambda widths: torch.stack([gain(width) for width in widths], dim=1))

    @abstractmethod
    def weight_range(self, w: Values, *, dim: int | None) -> ValueRange:
        """The range in which :meth:`weight` rounds ``w``.

        The output channels of ``w`` lie along ``dim``; if that is ``None``, all of ``w`` is one channel.
        """
        ...

    @abstractmethod
    def weight(
        self, w: Values, bits: Bits, *, dim: int | None, within: ValueRange | None = None, out: Tensor | None = None
    ) -> Values:
        """Round ``w``; ``within`` is its :meth:`weight_range` if the caller has it already."""
        ...

    def weight_gradient(self, w: Values, g: Values, bits: Bits) -> Values:
        """The gradient of ``w`` from ``g``, the gradient of the rounded weight."""
        return g

    @abstractmethod
    def gradient(
        self, g: Values, bits: Bits, *, axis: BatchAxis, seed: Seed = None, out: Tensor | None = None
    ) -> Values:
        """Round an output gradient, whose samples lie along ``axis``, stochastically.

        ``seed`` fixes the noise. Without it, the noise is drawn from torch's default generator.
        """
        ...

    def output_gradient(
        self,
        g: Values,
        bits: Int[Tensor, "*bits"],
        *,
        axis: BatchAxis,
        seed: Seed = None,
        out: Tensor | None = None,
    ) -> Values:
        """As :meth:`gradient`, but exactly zero, not noise, for samples at 0 bits, whose block is skipped."""
        rounded = self.gradient(g, bits, axis=axis, seed=seed, out=out)
        if known_bits(bits) not in (None, 0):
            return rounded
        return put_where(bits, (0,), 0.0, rounded.clone() if rounded is g else rounded)
