"""The bits of each row of a product, which decide whether the row is multiplied as codes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fractrain_fx.config import CODE_BITS
from fractrain_fx.config.precision import FLOAT_BITS
from fractrain_fx.execution.codes.layout import Codes, Layout
from fractrain_fx.execution.plan import Call, Plan
from fractrain_fx.formats.batch_axis import BatchAxis

__all__ = ["GRADIENT_BITS", "RowBits", "both_coded", "has_codes", "select_rows", "spread", "widths"]

# Bits of a gradient that its code of two bytes can hold.
GRADIENT_BITS = 16


@dataclass(frozen=True)
class RowBits:
    """The bits of the rows of a product; the rows of a sample have the sample's bits.

    Attributes:
        layout: how the contraction is a product of rows.
        fw: bits of the activation: one for all values, or one for each sample.
        bw: bits of the output's gradient: one for all values, or one for each sample; empty in evaluation.
    """

    layout: Layout
    fw: tuple[int, ...]
    bw: tuple[int, ...]

    def uncoded(
        self, axis: BatchAxis, shape: Sequence[int], rows: int, device: torch.device
    ) -> Int[Tensor, " some"] | None:
        """The rows whose activation has no codes."""
        marks = [not has_codes(bits) for bits in self.fw]
        if not any(marks):
            return None
        return self.layout.each(axis.expand(torch.tensor(marks, device=device), shape), shape, rows).nonzero().flatten()

    def in_float(
        self, plan: Plan, call: Call, g: Tensor, rows: int
    ) -> Iterator[tuple[bool, Int[Tensor, " some"] | None]]:
        """The rows that contribute to the gradient of the weight, but have to be multiplied in float.

        Yields:
            Whether the activation of some rows has codes, and these rows (``None``: all).
        """
        pairs = self.pairs()
        kinds = sorted(set(pairs))
        wanted = [(fw, bw) for fw, bw in kinds if bw and not both_coded(fw, bw)]
        if len(kinds) == 1 or not wanted:
            yield from ((has_codes(fw), None) for fw, _ in wanted)
            return
        numbers = self.by_row(plan, call, g, torch.tensor([kinds.index(pair) for pair in pairs]), rows)
        for fw, bw in wanted:
            yield has_codes(fw), (numbers == kinds.index((fw, bw))).nonzero().flatten()

    def without_others(self, plan: Plan, call: Call, g: Tensor, codes: Codes) -> Codes:
        """The codes of a gradient, with scale 0 in the rows that are multiplied in float (rows of 0 bits have it)."""
        others = [bw != 0 and not both_coded(fw, bw) for fw, bw in self.pairs()]
        if not any(others):
            return codes
        rows = self.by_row(plan, call, g, torch.tensor(others), len(codes.codes))
        return codes._replace(scale=spread(codes.scale, len(rows)).masked_fill(rows, 0))

    def refuses(self, plan: Plan, call: Call) -> str | None:
        """The reason why operands of these bits and shapes have no codes; ``None`` if they have."""
        w = widths(call.of_b.bits)
        if not all(map(has_codes, w)) or not any(map(has_codes, self.fw)):
            return f"operands of {self.fw[0]} and {w[0]} bits have no 8-bit codes"
        if not all(has_codes(bits) or bits in (0, FLOAT_BITS) for bits in self.fw):
            return f"an activation of {max(set(self.fw) - {FLOAT_BITS})} bits has no 8-bit codes"
        if len(self.bw) > 1 and 1 < len(self.fw) != len(self.bw):
            return "its output has other samples than its input"
        samples: list[BatchAxis] = [plan.first.axis] * (len(self.fw) > 1) + [plan.axis] * (len(self.bw) > 1)
        return self.layout.refuses(call.a.shape, call.b.shape, samples)

    def pairs(self) -> list[tuple[int, int]]:
        """Bits of activation and gradient: one pair for all, or one for each sample."""
        samples = max(len(self.fw), len(self.bw))
        return [(self.fw[i % len(self.fw)], self.bw[i % len(self.bw)]) for i in range(samples)]

    def by_row(self, plan: Plan, call: Call, g: Tensor, of_samples: Tensor, rows: int) -> Tensor:
        """One value for each row: that of the row's sample in ``of_samples``."""
        axis, shape = (self.axis(plan, g), g.shape) if len(self.bw) > 1 else (plan.first.axis, call.a.shape)
        return self.layout.each(axis.expand(of_samples.to(g.device), shape), shape, rows)

    def axis(self, plan: Plan, g: Tensor) -> BatchAxis:
        """Where the samples lie in a gradient of the output."""
        return plan.axis.at(g.shape, len(self.bw)) if len(self.bw) > 1 else plan.axis


def has_codes(bits: int) -> bool:
    """Whether a value rounded to ``bits`` has a code of one byte."""
    return 0 < bits <= CODE_BITS


def both_coded(fw: int, bw: int) -> bool:
    """Whether an activation of ``fw`` bits and a gradient of ``bw`` bits both have codes."""
    return has_codes(fw) and 0 < bw <= GRADIENT_BITS


def select_rows(x: Tensor, rows: Int[Tensor, " some"] | None) -> Tensor:
    """Some rows, or all."""
    return x if rows is None else x[rows]


def spread(ends: Float[Tensor, " runs"], rows: int) -> Float[Tensor, " rows"]:
    """One number for each row, from one for each of several equal runs of rows."""
    return ends.expand(rows) if ends.numel() == 1 else ends.repeat_interleave(rows // len(ends))


def widths(bits: Tensor) -> tuple[int, ...]:
    """One width, or one for each sample."""
    return tuple(bits.flatten().tolist())
