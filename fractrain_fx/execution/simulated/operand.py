"""One factor of a fused op: how it is rounded, what of it is kept for backward, and what its gradients are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fractrain_fx.config import Saved
from fractrain_fx.errors import PassError
from fractrain_fx.formats import CodedFormat, Format
from fractrain_fx.formats.bits import readable
from fractrain_fx.formats.scratch import scratch, scratch_holds
from fractrain_fx.nn.batch_axis import BatchAxis
from fractrain_fx.nn.quantizers import ActivationQuantizer, WeightQuantizer
from fractrain_fx.nn.rounding import gate_gradient

__all__ = ["Factor", "factor"]

# A weight of at most so many values is kept rounded: that is little memory, and rounding it again is all small ops.
_SMALL = 1 << 16


@dataclass(frozen=True)
class Factor:
    """A weight, rounded by ``channel``, or an activation.

    Attributes:
        fmt: the number format.
        widths: forward bits of each option, where a choice says which.
        axis: where the samples lie.
        inside: whether it is rounded in its own range.
        matrices: whether its product wants each matrix in one piece.
        saved: what is kept of it between forward and backward.
        weight: whether it is a weight.
        channel: the dimension of a weight that holds the output channels.
    """

    fmt: Format
    widths: tuple[int, ...]
    axis: BatchAxis
    inside: bool
    matrices: bool
    saved: Saved
    weight: bool = False
    channel: int | None = None

    def take(self, x: Tensor, bits: Tensor, lo: Tensor, span: Tensor, slot: int) -> tuple[Tensor, Tensor | None]:
        """The rounded factor, which lives for one product unless it is kept, and what is kept besides the operand."""
        if not x.numel() or not self.keeps(x):
            return self._round_for_now(x, bits, lo, span, slot), None
        if self.weight or self.saved == "rounded":
            rounded = self._round(x, bits, lo, span, None)
            return rounded, None if rounded is x else rounded
        if not isinstance(self.fmt, CodedFormat):
            raise PassError(f"format {self.fmt.name!r} has no codes to keep")
        out = scratch(x, slot, matrices=self.matrices)
        codes, rounded = self.fmt.activation_codes(x, bits, lo=lo, span=span, inside=self.inside, out=out)
        return rounded, codes

    def again(self, x: Tensor | None, kept: Tensor | None, bits: Tensor, lo: Tensor, span: Tensor, slot: int) -> Tensor:
        """The rounded factor in backward."""
        if kept is not None and kept.dtype != torch.uint8:
            return kept
        if kept is not None and isinstance(self.fmt, CodedFormat):
            out = scratch(kept, slot, matrices=self.matrices) if lo.dtype == torch.float32 else None
            return self.fmt.activation_values(kept, bits, lo=lo, span=span, inside=self.inside, out=out)
        assert x is not None
        return self._round_for_now(x, bits, lo, span, slot)

    def needed(self, kept: Tensor | None, choice: bool) -> bool:
        """Whether backward reads the operand itself. A weight is there anyway."""
        return self.weight or kept is None or choice or not self.fmt.straight

    def gradient(self, x: Tensor | None, g: Tensor, bits: Tensor) -> Tensor:
        """The gradient of the factor from ``g``, that of the rounded factor."""
        if x is None:
            return g
        if self.weight:
            return self.fmt.weight_gradient(x, g, bits)
        return self.fmt.activation_gradient(x, g, self.axis.expand(bits, x.shape))

    def of_choice(self, x: Tensor, g: Tensor, lo: Tensor, span: Tensor, samples: int) -> Tensor:
        """The gradient of every option of every sample."""
        x = x.to(torch.promote_types(x.dtype, g.dtype))  # codes are those of float32
        return gate_gradient(self.fmt, x, g, self.widths, self.axis, lo, span, self.inside, samples)

    def keeps(self, x: Tensor) -> bool:
        """Whether more is kept of it between forward and backward than the operand."""
        if self.weight:
            return x.numel() <= _SMALL or self.saved == "rounded"
        return self.saved != "operands"

    def _round_for_now(self, x: Tensor, bits: Tensor, lo: Tensor, span: Tensor, slot: int) -> Tensor:
        """Rounded into memory that other ops use again; what already lies there for the same tensor stays."""
        if self.weight or not readable(x):
            return self._round(x, bits, lo, span, scratch(x, slot, matrices=self.matrices))
        rounded = self.once(x, bits, lo, span, slot, lambda out: self._round(x, bits, lo, span, out))
        assert rounded is not None
        return rounded

    def once(
        self,
        x: Tensor,
        bits: Tensor,
        lo: Tensor,
        span: Tensor,
        slot: int,
        rounded: Callable[[Tensor | None], Tensor | None],
    ) -> Tensor | None:
        """A rounded activation that lies in memory already, or what ``rounded`` makes there for the next op to find."""
        how = self.fmt, self.axis, self.inside, self.matrices, bits.tolist(), float(lo), float(span)
        found: Tensor | None = scratch_holds(slot).of(x, how)
        if found is None:
            out = scratch(x, slot, matrices=self.matrices)
            found = rounded(out)
            if out is not None and found is out:
                scratch_holds(slot).keep(x, how, out)
        return found

    def _round(self, x: Tensor, bits: Tensor, lo: Tensor, span: Tensor, out: Tensor | None) -> Tensor:
        if self.weight:
            return self.fmt.weight(x, bits, dim=self.channel, ends=(lo, span), out=out)
        bits = self.axis.expand(bits, x.shape)
        return self.fmt.activation(x, bits, lo=lo, span=span, inside=self.inside, out=out)


def factor(quantizer: ActivationQuantizer | WeightQuantizer, training: bool, matrices: bool, saved: Saved) -> Factor:
    """What a quantize node says of its tensor, in training or in evaluation."""
    if isinstance(quantizer, WeightQuantizer):
        return Factor(quantizer.fmt, (), BatchAxis(), True, matrices, saved, weight=True, channel=quantizer.dim)
    return Factor(quantizer.fmt, quantizer.widths, quantizer.axis, training, matrices, saved)
