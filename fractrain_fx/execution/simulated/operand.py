"""One factor of a fused op: its rounding, the form in which it is saved for backward, and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fractrain_fx.config import GateGradient
from fractrain_fx.formats import Format, ValueRange
from fractrain_fx.formats.bits import readable
from fractrain_fx.formats.scratch import Order, scratch, scratch_holds, scratch_of
from fractrain_fx.nn.batch_axis import BatchAxis
from fractrain_fx.nn.frozen_weight import FrozenWeight
from fractrain_fx.nn.quantizers import ActivationQuantizer, WeightQuantizer
from fractrain_fx.nn.rounding import gate_gradient

__all__ = ["Factor", "Rounds", "factor"]

# A weight of at most this many values is saved rounded: it takes little memory, and rounding it again takes many small
# ops.
_SMALL = 1 << 16


class Rounds(NamedTuple):
    """How a factor is rounded in this step: its bits and its range."""

    bits: Tensor
    within: ValueRange


@dataclass(frozen=True)
class Factor:
    """A weight, rounded channel by channel, or an activation.

    Attributes:
        fmt: the number format.
        widths: forward bits of each option, if samples choose among options.
        axis: where the samples lie.
        order: the order in memory in which its product reads it quickest.
        weight: whether it is a weight.
        channel: the dimension of a weight that holds the output channels.
        quantizer: of a weight, which may have it as codes.
        estimate: how the gradient of the samples' choices is estimated.
    """

    fmt: Format
    widths: tuple[int, ...]
    axis: BatchAxis
    order: Order
    weight: bool = False
    channel: int | None = None
    quantizer: WeightQuantizer | None = None
    estimate: GateGradient = "straight-through"

    @property
    def frozen(self) -> FrozenWeight | None:
        """A weight's codes, which then come instead of the weight and are read anew for each product."""
        return None if self.quantizer is None else self.quantizer.frozen

    def take(self, x: Tensor, rounds: Rounds, slot: int, order: Order | None = None) -> tuple[Tensor, Tensor | None]:
        """The rounded factor, and the tensor to save besides the operand, if any.

        A rounded factor that is not saved lives for one product only, in memory of its own ``order`` or of the one
        that is given.
        """
        if not x.numel() or not self.saves_more(x):
            return self._round_for_now(x, rounds, slot, order), None
        rounded = self._round(x, rounds, None)
        return rounded, None if rounded is x else rounded

    def again(self, x: Tensor, saved: Tensor | None, rounds: Rounds, slot: int, order: Order | None = None) -> Tensor:
        """The rounded factor in backward."""
        if saved is not None:
            return saved
        return self._round_for_now(x, rounds, slot, order)

    def gradient(self, x: Tensor, g: Tensor, bits: Tensor) -> Tensor:
        """The gradient of the factor from ``g``, that of the rounded factor."""
        if self.weight:
            return self.fmt.weight_gradient(x, g, bits)
        return self.fmt.activation_gradient(x, g, self.axis.expand(bits, x.shape))

    def of_choice(self, x: Tensor, g: Tensor, rounds: Rounds) -> Tensor:
        """The gradient of every option of every sample."""
        x = x.to(torch.promote_types(x.dtype, g.dtype))  # products of codes give float32 gradients for half types
        return gate_gradient(self.fmt, x, g, self.widths, self.axis, rounds.within, len(rounds.bits), self.estimate)

    def saves_more(self, x: Tensor) -> bool:
        """Whether autograd keeps more of it than the operand."""
        return self.weight and x.numel() <= _SMALL and self.frozen is None

    def _round_for_now(self, x: Tensor, rounds: Rounds, slot: int, order: Order | None = None) -> Tensor:
        """The factor, rounded into memory that other ops reuse; or the copy that lies there from the same tensor."""
        if self.frozen is not None:
            return self.frozen.values(x, rounds, scratch_of(self.frozen.shape, rounds.within.lo, slot))
        if self.weight or not readable(x):
            return self._round(x, rounds, scratch(x, slot, self.order))
        rounded = self.once(x, rounds, slot, lambda out: self._round(x, rounds, out), order)
        assert rounded is not None
        return rounded

    def once(
        self,
        x: Tensor,
        rounds: Rounds,
        slot: int,
        rounded: Callable[[Tensor | None], Tensor | None],
        order: Order | None = None,
    ) -> Tensor | None:
        """The rounded activation in scratch memory; if it is not there, ``rounded`` makes it, for the next op too."""
        bits, (lo, span, measured_here) = rounds
        order = order or self.order
        how = self.fmt, self.axis, order, bits.tolist(), float(lo), float(span), measured_here
        found: Tensor | None = scratch_holds(slot).of(x, how)
        if found is None:
            out = scratch(x, slot, order)
            found = rounded(out)
            if out is not None and found is out:
                scratch_holds(slot).keep(x, how, out)
        return found

    def _round(self, x: Tensor, rounds: Rounds, out: Tensor | None) -> Tensor:
        bits, within = rounds
        if self.weight:
            return self.fmt.weight(x, bits, dim=self.channel, within=within, out=out)
        return self.fmt.activation(x, self.axis.expand(bits, x.shape), within, out=out)


def factor(quantizer: ActivationQuantizer | WeightQuantizer, order: Order) -> Factor:
    """The factor that a quantizer rounds."""
    if isinstance(quantizer, WeightQuantizer):
        return Factor(quantizer.fmt, (), BatchAxis(), order, True, quantizer.dim, quantizer)
    return Factor(quantizer.fmt, quantizer.widths, quantizer.axis, order, estimate=quantizer.estimate)
