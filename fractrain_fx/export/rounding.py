"""Rounding with everything fixed: bits, and the range where the format has one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fractrain_fx.errors import ExportError
from fractrain_fx.formats import Format, Operand, ValueRange
from fractrain_fx.formats.affine.scale import levels_of
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.nn.full_precision import FullPrecision

__all__ = ["CodedWeight", "FrozenRounding", "Levels", "LevelsName", "integer_range", "require_levels"]

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
        within: the range; ``None`` for a format that measures blocks as it rounds, or the samples of each call.
        of: the operand of the forward product that this is, for a format with blocks.
        axis: where the samples lie.
    """

    lo: Tensor
    span: Tensor
    bits: Tensor

    def __init__(self, fmt: Format, bits: int, within: ValueRange | None, of: Operand | None, axis: BatchAxis) -> None:
        super().__init__()
        self.fmt, self.width, self.of, self.axis = fmt, bits, of, axis
        self.register_buffer("bits", torch.tensor(bits, dtype=torch.int32))
        if within is not None:
            self.register_buffer("lo", within.lo.detach().clone())
            self.register_buffer("span", within.span.detach().clone())
        self.has_range = within is not None

    def forward(self, x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
        """The rounded values."""
        if self.of is not None:
            return self.fmt.operand(x, self.bits, self.of)
        within = ValueRange(self.lo, self.span) if self.has_range else self.fmt.sample_ranges(x, self.axis)
        return self.fmt.activation(x, self.bits, within)

    def extra_repr(self) -> str:
        return f"{self.fmt.name}, {self.width} bits"


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
