"""Rounded factors as values, in memory that ops lend one another, and what of them backward keeps."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fractrain_fx.execution.plan import Factor, Kept, Rounds
from fractrain_fx.formats import ValueRange
from fractrain_fx.formats.bits import readable
from fractrain_fx.formats.scratch import Latest, Order, scratch, scratch_of

__all__ = [
    "FIRST",
    "GRADIENT",
    "SECOND",
    "Rounded",
    "is_small",
    "round_again",
    "round_factor",
]

# Slots of scratch memory for the operands of the current op: its activations, the output's gradient, its weights.
FIRST, SECOND, GRADIENT = range(3)
_WEIGHTS = {FIRST: 5, SECOND: 6}

# A weight of at most this many values is saved rounded: it takes little memory, and rounding it again takes many small
# ops.
_SMALL = 1 << 16

# The latest activation in each slot's memory, for the next op that reads the same tensor (as queries, keys and values
# do). Nothing else writes into that memory.
_latest = {FIRST: Latest(), SECOND: Latest()}


class Rounded(NamedTuple):
    """A rounded factor, and the range that it was rounded in."""

    values: Tensor
    within: ValueRange

    def kept(self, factor: Factor, x: Tensor) -> Kept:
        """What of a factor is kept besides the operand ``x``: nothing of an activation, whose range the call has."""
        if not factor.weight or factor.frozen is not None:
            return Kept()
        return Kept(self.values) if is_small(x) and self.values is not x else Kept(None, self.within)


def is_small(w: Tensor) -> bool:
    """Whether a weight is so small that it is saved rounded."""
    return w.numel() <= _SMALL


def round_factor(factor: Factor, x: Tensor, rounds: Rounds, slot: int, order: Order | None = None) -> Rounded:
    """Measure a factor, if it is a weight, and round it by the functions of its format.

    The values last until the next op, unless they are those of a small weight, which may be kept.
    """
    bits, within = rounds
    if factor.frozen is not None:
        assert within is not None
        memory = scratch_of(factor.frozen.shape, within.lo, _WEIGHTS[slot])
        return Rounded(factor.frozen.values(x, (bits, within), memory), within)
    if factor.weight:
        within = within or factor.fmt.weight_range(x.detach(), dim=factor.channel)
        out = None if is_small(x) and x.numel() else scratch(x, _WEIGHTS[slot], factor.order)
        return Rounded(factor.fmt.weight(x, bits, dim=factor.channel, within=within, out=out), within)
    assert within is not None
    return Rounded(_round_activation(factor, x, bits, within, slot, order or factor.order), within)


def round_again(factor: Factor, x: Tensor, rounds: Rounds, kept: Kept, slot: int, order: Order | None = None) -> Tensor:
    """The rounded factor in backward."""
    if kept.values is not None:
        return kept.values
    rounds = rounds if kept.within is None else rounds._replace(within=kept.within)
    return round_factor(factor, x, rounds, slot, order).values


def _round_activation(factor: Factor, x: Tensor, bits: Tensor, within: ValueRange, slot: int, order: Order) -> Tensor:
    """The rounded activation: what the op before made of it in this slot's memory, if it rounded the same tensor."""
    expanded = factor.axis.expand(bits, x.shape)
    if not readable(x):
        return factor.fmt.activation(x, expanded, within)
    how = factor.fmt, factor.axis, order, bits.tolist(), within.lo.tolist(), within.span.tolist(), within.measured_here
    values: Tensor | None = _latest[slot].of(x, how)
    if values is None:
        _latest[slot].drop()
        out = scratch(x, slot, order)
        values = factor.fmt.activation(x, expanded, within, out=out)
        if values is out:
            _latest[slot].keep(x, how, values)
    return values
