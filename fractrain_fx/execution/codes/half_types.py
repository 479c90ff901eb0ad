"""A fused op on integer codes whose operands or result have half types, as under autocast."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fractrain_fx.execution.simulated.arithmetic import Gradients, Needs
from fractrain_fx.execution.simulated.strategy import Call, Contracted, Plan, Strategy

__all__ = ["HALF_TYPES", "HalfPrecision"]

HALF_TYPES = frozenset({torch.bfloat16, torch.float16})


@dataclass(frozen=True)
class HalfPrecision:
    """Computes a product as in float32 and gives the result in a half type.

    The simulation rounds operands to their levels and then, before it multiplies, to the half type. Codes skip this
    second rounding, so the result is nearer to that of float32 than the simulation's.

    Attributes:
        strategy: the strategy for operands in float32.
        dtype: type of the result.
    """

    strategy: Strategy
    dtype: torch.dtype

    def forward(self, plan: Plan, call: Call) -> Contracted:
        with torch.autocast(call.a.device.type, enabled=False):
            out, *saved = self.strategy.forward(plan, _widened(call))
        return out.to(self.dtype), saved[0], saved[1]

    def backward(
        self, plan: Plan, call: Call, g: Tensor, saved: tuple[Tensor | None, Tensor | None], needs: Needs
    ) -> Gradients:
        with torch.autocast(g.device.type, enabled=False):
            return self.strategy.backward(plan, _widened(call), g.float(), saved, needs)


def _widened(call: Call) -> Call:
    a, b, added = (None if x is None else x.float() for x in (call.a, call.b, call.added))
    return call._replace(a=a, b=b, added=added)
