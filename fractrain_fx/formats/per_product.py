"""Formats that round a tensor anew for each product that reads it, and measure it as they do."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from fractrain_fx.formats.base import Bits, Format, Operand, Seed, ValueRange, Values
from fractrain_fx.formats.batch_axis import BatchAxis

__all__ = ["PerProductFormat"]


class PerProductFormat(Format):
    """A format that is asked for operands of products; everything else follows from those of a linear layer."""

    per_product = True

    @abstractmethod
    def operand(self, x: Values, bits: Bits, of: Operand, *, seed: Seed = None) -> Values:
        """Round an operand of a product."""
        ...

    def activation_range(self, x: Values) -> ValueRange:
        """Always 0..1: such a format measures operands as it rounds them."""
        return ValueRange(torch.zeros((), device=x.device), torch.ones((), device=x.device))

    def activation(self, x: Values, bits: Bits, within: ValueRange, *, out: Tensor | None = None) -> Values:
        """As ``x`` of the forward product of a linear layer; no range is read."""
        return self.operand(x, bits, Operand("forward", "x", (x.ndim - 1,)))

    def weight_range(self, w: Values, *, dim: int | None) -> ValueRange:
        """Always 0..1: such a format measures operands as it rounds them."""
        return self.activation_range(w)

    def weight(
        self, w: Values, bits: Bits, *, dim: int | None, within: ValueRange | None = None, out: Tensor | None = None
    ) -> Values:
        """As ``w`` of the forward product of a layer whose output channels lie along ``dim``."""
        along = 0 if dim is None or w.ndim < 2 or dim % w.ndim else 1
        return self.operand(w, bits, Operand("forward", "w", (along,)))

    def gradient(
        self, g: Values, bits: Bits, *, axis: BatchAxis, seed: Seed = None, out: Tensor | None = None
    ) -> Values:
        """As ``g`` of the input gradient of a linear layer."""
        return self.operand(g, bits, Operand("input_gradient", "g", (g.ndim - 1,)), seed=seed)
