"""A fused op on integer codes whose operands or result are of half types, as under autocast."""

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
    """A product that is computed as in float32, with a result of a half type.

    The simulation rounds to a half type what it has rounded to its levels, before it multiplies; codes need not be. So
    this is nearer to what float32 gives than the simulation in that type.

    Attributes:
        strategy: of operands in float32.
        dtype: of the result.
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
