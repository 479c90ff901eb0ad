"""Rounding with everything fixed: bits, and the range where the format has one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fractrain_fx.errors import ExportError
from fractrain_fx.formats import Format, Operand, ValueRange
from fractrain_fx.formats.affine.rounding import round_affine
from fractrain_fx.formats.affine.scale import levels_of
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.nn.full_precision import FullPrecision

__all__ = [
    "CodedWeight",
    "FrozenRounding",
    "Levels",
    "LevelsName",
    "WeightRounding",
    "integer_range",
    "require_levels",
]

LevelsName = Literal["exact", "integer"]
"""``exact``: the levels of evaluation, of which none need be 0. ``integer``: those that integer kernels multiply."""

# A level that is this near to 0, as a share of the distance between levels, is 0: float32 rounds `lo` and the scale.
_NEAR = 1e-4


def require_levels(value: str) -> None:
    """Check the setting.

    Raises:
        ExportError: it is unknown.
    """
    if value not in get_args(LevelsName):
        raise ExportError(
            f"levels={value!r} is unknown: write 'exact' for the levels of evaluation, or 'integer' for levels that "
            "integer kernels multiply, of which one is 0"
        )


class FrozenRounding(FullPrecision):
    """Round an activation as evaluation does, with bits and range that no longer change.

    Args:
        fmt: the number format.
        bits: of the values.
        within: the range; ``None`` for a format that measures ranges or blocks of each call.
        of: the operand of the forward product that this is, for a format that rounds anew for each product.
        axis: where the samples lie.
        levels: those of format ``affine``, in measured ranges; a fixed range has them already.
    """

    lo: Tensor
    span: Tensor
    bits: Tensor

    def __init__(
        self,
        fmt: Format,
        bits: int,
        within: ValueRange | None,
        of: Operand | None,
        axis: BatchAxis,
        levels: LevelsName = "exact",
    ) -> None:
        super().__init__()
        self.fmt, self.width, self.of, self.axis, self.levels = fmt, bits, of, axis, levels
        self.register_buffer("bits", torch.tensor(bits, dtype=torch.int32))
        if within is not None:
            self.register_buffer("lo", within.lo.detach().clone())
            self.register_buffer("span", within.span.detach().clone())
        self.has_range = within is not None

    def forward(self, x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
        """The rounded values."""
        if self.of is not None and self.levels == "exact":
            return self.fmt.operand(x, self.bits, self.of)
        if not x.numel():
            return x
        within = self.range_of(x)
        return self.fmt.activation(x, self.bits, within) if self.of is None else round_affine(x, self.bits, within)

    def range_of(self, x: Float[Tensor, "*dims"]) -> ValueRange:
        """The range, or the ranges of the values, which broadcast against them."""
        if self.has_range:
            return ValueRange(self.lo, self.span)
        within = self.fmt.sample_ranges(x, self.axis) if self.of is None else self.fmt.range_of(x, self.of)
        assert within is not None  # only formats with ranges are asked
        return within if self.levels == "exact" else integer_range(within, self.width, weight=False)

    def extra_repr(self) -> str:
        return f"{self.fmt.name}, {self.width} bits"


class WeightRounding(NamedTuple):
    """How a weight is rounded as evaluation does.

    Attributes:
        fmt: the number format.
        bits: of the values.
        of: the operand of the forward product that it is, for a format that rounds anew for each product.
        dim: the dimension of the output channels.
        levels: those of format ``affine``.
    """

    fmt: Format
    bits: int
    of: Operand | None
    dim: int | None
    levels: LevelsName = "exact"

    def range_of(self, w: Float[Tensor, "*dims"]) -> ValueRange | None:
        """The range of each output channel, for a format with ranges."""
        within = self.fmt.weight_range(w, dim=self.dim) if self.of is None else self.fmt.range_of(w, self.of)
        if within is None or self.levels == "exact":
            return within
        return integer_range(within, self.bits, weight=True)

    def rounded(self, w: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
        """The values after rounding."""
        bits = torch.tensor(self.bits, dtype=torch.int32, device=w.device)
        if self.of is not None and self.levels == "exact":
            return self.fmt.operand(w, bits, self.of)
        within = self.range_of(w)
        if self.of is None:
            return self.fmt.weight(w, bits, dim=self.dim, within=within)
        assert within is not None  # only format affine has other levels
        return round_affine(w, bits, within)


@dataclass(frozen=True)
class Levels:
    """The levels ``scale * (code - zero_point) + offset`` of an activation, as integer formats write them.

    Attributes:
        scale: distance between levels.
        zero_point: a code, from 0.
        offset: the value of the level ``zero_point``; ``None`` if that is 0.
    """

    scale: Float[Tensor, ""]
    zero_point: int
    offset: Float[Tensor, ""] | None

    @classmethod
    def of(cls, within: ValueRange, bits: int) -> Levels:
        """The levels of format ``affine`` in a range."""
        levels = levels_of(within, bits)
        away = levels.zero_level - levels.zero
        return cls(levels.scale, int(levels.zero_level), levels.scale * away if float(away.abs()) > _NEAR else None)


@dataclass(frozen=True)
class CodedWeight:
    """A weight as ``scale * code + center`` with signed codes, one scale and center for each output channel.

    Attributes:
        codes: from ``-2^(bits - 1)`` to ``2^(bits - 1) - 1``, in int8.
        scale: distance between levels.
        center: the value of code 0; ``None`` if that is 0 in every channel.
        bits: of a code.
    """

    codes: Int[Tensor, "*dims"]
    scale: Float[Tensor, "*ends"]
    center: Float[Tensor, "*ends"] | None
    bits: int

    @classmethod
    def of(cls, rounded: Float[Tensor, "*dims"], within: ValueRange, bits: int) -> CodedWeight:
        """The codes of a weight that was rounded in a range."""
        levels, half = levels_of(within, bits), 2 ** (bits - 1)
        center = levels.values(torch.full_like(levels.scale, half))
        near = bool((center.abs() <= _NEAR * levels.scale).all())
        codes = (levels.nearest(rounded) - half).to(torch.int8)
        return cls(codes, levels.scale, None if near else center, bits)

    def times(self, factor: Float[Tensor, "*ends"]) -> CodedWeight:
        """The weight after each channel is multiplied by a number."""
        scale, flip = self.scale * factor.abs(), factor < 0
        if self.center is None:  # the lowest code of such a weight is not in use
            return CodedWeight(torch.where(flip, -self.codes, self.codes), scale, None, self.bits)
        codes = torch.where(flip, -1 - self.codes, self.codes)
        return CodedWeight(codes, scale, self.center * factor + torch.where(flip, scale, 0), self.bits)


def integer_range(within: ValueRange, bits: int, *, weight: bool) -> ValueRange:
    """A range with levels that integer kernels multiply, of about the same reach.

    The levels of a weight lie evenly around 0, and the lowest is not in use. Those of an activation are moved, by at
    most half a level, so that one of them is 0, after the range was extended to hold 0.
    """
    lo = within.lo.clamp(max=0)
    hi = (within.lo + within.span).clamp(min=0)
    if weight:
        scale = levels_of(ValueRange(lo, torch.maximum(-lo, hi)), bits - 1).scale
        return ValueRange(-scale * 2 ** (bits - 1), scale * (2**bits - 1))
    levels = levels_of(ValueRange(lo, hi - lo), bits)
    return ValueRange(-levels.scale * levels.zero.round(), levels.scale * levels.highest)
