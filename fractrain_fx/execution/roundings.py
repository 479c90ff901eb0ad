"""The six operands of an op's three products, and how each is rounded.

The first factor is ``x`` and the second is ``w``, unless the first is the op's weight. Of two activations the second
stands for the weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fractrain_fx.config.products import ProductName
from fractrain_fx.execution.arithmetic import Convolution, GroupedMatMul
from fractrain_fx.execution.axes import Dims, Summed, kept_rows, of_first, of_output, of_second, positions
from fractrain_fx.execution.plan import Call, Factor, Plan, Rounds
from fractrain_fx.execution.rounded import FIRST, SECOND
from fractrain_fx.formats import Format, Operand, Reach, ValueRange
from fractrain_fx.formats.bits import put_where
from fractrain_fx.formats.microscaling.hadamard import needs_rotation, rotate, rotation_at
from fractrain_fx.formats.noise import APART

__all__ = [
    "MixedRows",
    "Rounding",
    "factor_of",
    "forward_operands",
    "forward_roundings",
    "gradient_roundings",
    "mixed_rows",
    "without_skipped",
]


@dataclass(frozen=True)
class Rounding:
    """One operand of a product before it is rounded, and how it is rounded.

    Attributes:
        values: the operand, after a transform of both operands if the format has one.
        bits: its widths, which broadcast against the values.
        of: which operand it is.
        fmt: its number format.
        within: the range that it is rounded in, if the format rounds all products alike.
        seed: of its noise.
    """

    values: Tensor
    bits: Tensor
    of: Operand
    fmt: Format
    within: ValueRange | None = None
    seed: Tensor | None = None

    def rounded(self) -> Tensor:
        """The values as the product multiplies them."""
        fmt, x, bits, of = self.fmt, self.values, self.bits, self.of
        if fmt.per_product:
            return fmt.operand(x, bits, of, seed=self.seed)
        if of.samples is not None:
            return fmt.output_gradient(x, bits, axis=of.samples, seed=self.seed)
        if of.weight:
            return fmt.weight(x, bits, dim=of.channel, within=self.within)
        return fmt.activation(x, bits, self.within or fmt.activation_range(x))

    def reach(self) -> Reach:
        """How far the levels reach, and which values become 0."""
        return self.fmt.reach(self.values, self.bits, self.of, self.within)


class MixedRows(NamedTuple):
    """A transform of the rows of an output gradient, which its product undoes.

    Attributes:
        of_g, of_product: the dimension that holds the rows.
        matrix: mixes neighbouring rows; its own inverse.
    """

    of_g: int
    of_product: int
    matrix: Tensor


def forward_roundings(plan: Plan, call: Call) -> tuple[Rounding, Rounding]:
    """Both factors of the forward product."""
    summed, a, b = of_output(plan.arithmetic, call.a, call.b), call.a, call.b
    if _may_mix(plan, "forward", summed):
        assert summed.one is not None
        a, b = plan.fmt.transform("forward", a, b, summed.one, (call.of_a.bits, call.of_b.bits), None)
    first = _factor(plan, call, FIRST, "forward", summed.first, a)
    return first, _factor(plan, call, SECOND, "forward", summed.second, b)


def forward_operands(plan: Plan, a: Tensor, b: Tensor) -> tuple[Operand, Operand]:
    """Both factors as operands of the forward product; of the tensors only the shapes are read."""
    rounds = Rounds(torch.zeros((), dtype=torch.int32), None)
    first, second = forward_roundings(plan, Call(a, b, None, rounds, rounds, None, None))
    return first.of, second.of


def gradient_roundings(
    plan: Plan, call: Call, g: Tensor, slot: int, seed: Tensor | None
) -> tuple[Rounding | None, Rounding]:
    """The operands of the product of ``g`` and the factor ``slot``, which gives the other factor's gradient.

    The first is ``None`` if the gradient is not rounded.
    """
    _, x, rounds = factor_of(plan, call, slot)
    product: ProductName = "weight_gradient" if (slot == SECOND) == plan.first.weight else "input_gradient"
    summed, other = _summed_backward(plan, call, g, slot)
    bits = call.bits if plan.fmt.by_product and call.bits is not None else rounds.bits
    recipe = plan.fmt.recipe
    if recipe is not None and getattr(recipe, product).second.again:
        x = forward_roundings(plan, call)[slot].rounded().to(x.dtype)
    if call.bits is None or seed is None:
        return None, _factor(plan, call, slot, product, summed.second, x, bits)
    if (rows := mixed_rows(plan, call, g, slot)) is not None:
        g = rotate(g, rows.of_g, rows.matrix)
    if _may_mix(plan, product, summed):
        assert summed.one is not None
        g, x = plan.fmt.transform(product, g, x, summed.one, (call.bits, bits), seed + 2 * APART)
    axis = plan.axis.of_bits(call.bits, g.shape)
    window, ends = positions(plan.arithmetic, g), _group_ends(plan, call, slot)
    of = Operand(product, "g", summed.first, axis, across=other.first, positions=window, group_ends=ends)
    of_g = Rounding(g, axis.expand(call.bits, g.shape), of, plan.fmt, seed=seed)
    return of_g, _factor(plan, call, slot, product, summed.second, x, bits, seed + 3 * APART)


def mixed_rows(plan: Plan, call: Call, g: Tensor, slot: int) -> MixedRows | None:
    """How the product of ``g`` and the factor ``slot`` mixes rows; ``None`` if its recipe or its bits ask for none."""
    recipe, length = plan.fmt.recipe, None
    if (slot == FIRST) == plan.first.weight:
        length = None if recipe is None else recipe.input_gradient.rows
    if length is None or call.bits is None:
        return None
    dims = kept_rows(plan.arithmetic, g, call.a, call.b, slot == SECOND)
    bits = call.bits if plan.fmt.by_product else factor_of(plan, call, slot)[2].bits
    if dims is None or not needs_rotation((call.bits, bits)):
        return None
    width = math.gcd(length, g.shape[dims[0]])
    return MixedRows(*dims, rotation_at((call.bits, bits), width, None, g.new_empty(0)))


def factor_of(plan: Plan, call: Call, slot: int) -> tuple[Factor, Tensor, Rounds]:
    """A factor, its tensor, and how it is rounded."""
    return (plan.first, call.a, call.of_a) if slot == FIRST else (plan.second, call.b, call.of_b)


def _group_ends(plan: Plan, call: Call, slot: int) -> Tensor | None:
    """The ends of the groups whose rows the product of the output's gradient and a factor sums apart."""
    return call.added if isinstance(plan.arithmetic, GroupedMatMul) and slot == FIRST else None


def without_skipped(plan: Plan, call: Call, g: Tensor) -> Tensor:
    """Exactly zero for samples at 0 bits, whose block is skipped."""
    if call.bits is None or not call.bits.ndim:
        return g
    axis = plan.axis.at(g.shape, len(call.bits))
    return put_where(axis.expand(call.bits, g.shape), (0,), 0.0, g.clone())


def _summed_backward(plan: Plan, call: Call, g: Tensor, slot: int) -> tuple[Summed, Summed]:
    """The dimensions summed by the product of ``g`` and a factor, and by the other product that reads ``g``."""
    of_a, of_b = of_first(plan.arithmetic, g, call.b), of_second(plan.arithmetic, g, call.a, call.b)
    return (of_b, of_a) if slot == FIRST else (of_a, of_b)


def _may_mix(plan: Plan, product: ProductName, summed: Summed) -> bool:
    """Whether a transform along one summed dimension leaves a product as it is.

    The channels of a grouped convolution are not all summed together.
    """
    grouped = isinstance(plan.arithmetic, Convolution) and plan.static[-1] != 1
    return summed.one is not None and (product == "weight_gradient" or not grouped)


def _factor(
    plan: Plan,
    call: Call,
    slot: int,
    product: ProductName,
    along: Dims,
    x: Tensor,
    bits: Tensor | None = None,
    seed: Tensor | None = None,
) -> Rounding:
    """A factor (transformed, perhaps) for one product, at ``bits`` instead of its own where they are given."""
    factor, _, rounds = factor_of(plan, call, slot)
    bits = rounds.bits if bits is None else bits
    tensor: Literal["x", "w"] = "w" if (slot == FIRST) == plan.first.weight else "x"
    across = _read_across(plan, call, slot, product)
    window = positions(plan.arithmetic, x)
    ends = None if product == "forward" else _group_ends(plan, call, slot)
    of = Operand(product, tensor, along, None, factor.channel, across, factor.weight, window, ends)
    expanded = bits if factor.weight else factor.axis.expand(bits, x.shape)
    return Rounding(x, expanded, of, factor.fmt, rounds.within, seed)


def _summed_forward(plan: Plan, call: Call, slot: int) -> Dims:
    """The dimensions of a factor that the forward product sums over."""
    summed = of_output(plan.arithmetic, call.a, call.b)
    return summed.first if slot == FIRST else summed.second


def _read_across(plan: Plan, call: Call, slot: int, product: ProductName) -> Dims:
    """The dimensions that the other product which reads a factor sums over."""
    if product != "forward":
        return _summed_forward(plan, call, slot)
    if slot == SECOND:
        return of_first(plan.arithmetic, call.a, call.b).second
    return of_second(plan.arithmetic, call.b, call.a, call.b).second
