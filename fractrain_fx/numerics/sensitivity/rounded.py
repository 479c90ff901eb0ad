"""The rounding errors of an op's operands at a width."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fractrain_fx.config.precision import FLOAT_BITS
from fractrain_fx.execution.plan import Call, Plan, Rounds
from fractrain_fx.execution.rounded import FIRST, SECOND, round_factor
from fractrain_fx.execution.roundings import forward_roundings, gradient_roundings
from fractrain_fx.nn.rounding import rounded_gradient

__all__ = ["OPERANDS", "GradientErrors", "OperandName", "factor_error", "gradient_errors", "slot_of"]

OperandName = Literal["x", "w", "g"]
OPERANDS: tuple[OperandName, ...] = ("x", "w", "g")
"""An activation, a weight (or the second of two activations), and an output gradient."""


class GradientErrors(NamedTuple):
    """The rounding errors of an output gradient, in its product with the second factor and in that with the first."""

    by_second: Tensor
    by_first: Tensor


def slot_of(plan: Plan, operand: OperandName) -> int:
    """The place of ``x`` or ``w`` among the factors of an op."""
    return FIRST if (operand == "w") == plan.first.weight else SECOND


@torch.no_grad()
def factor_error(plan: Plan, call: Call, slot: int, bits: int) -> Tensor:
    """``Q(x) - x`` of a factor, as the forward product rounds it."""
    x = call.a if slot == FIRST else call.b
    width = torch.tensor(bits, dtype=torch.int32, device=x.device)
    if plan.fmt.per_product:
        full = torch.full_like(width, FLOAT_BITS)
        widths = (width, full) if slot == FIRST else (full, width)
        of_a, of_b = (Rounds(each, old.within) for each, old in zip(widths, (call.of_a, call.of_b), strict=True))
        roundings = forward_roundings(plan, call._replace(of_a=of_a, of_b=of_b))
        values = roundings[0 if slot == FIRST else 1].rounded()
    else:
        factor, rounds = (plan.first, call.of_a) if slot == FIRST else (plan.second, call.of_b)
        values = round_factor(factor, x, Rounds(width, rounds.within), slot).values
    error: Tensor = values.to(x.dtype) - x
    return error


@torch.no_grad()
def gradient_errors(plan: Plan, call: Call, g: Tensor, bits: int, seed: Tensor) -> GradientErrors:
    """The rounding errors of an output gradient; the same in both products unless the format rounds it anew."""
    width = torch.tensor(bits, dtype=torch.int32, device=g.device)
    if plan.fmt.per_product:
        call = call._replace(bits=width, seed=seed)
        return GradientErrors(_gradient_error(plan, call, g, SECOND), _gradient_error(plan, call, g, FIRST))
    error = rounded_gradient(plan.fmt, g, width, plan.axis, seed).to(g.dtype) - g
    return GradientErrors(error, error)


def _gradient_error(plan: Plan, call: Call, g: Tensor, slot: int) -> Tensor:
    """What rounding adds to ``g`` in its product with the factor ``slot``."""
    with torch.enable_grad():
        whole = g.detach().requires_grad_()
        of_g, _ = gradient_roundings(plan, call, whole, slot, call.seed)
        assert of_g is not None
        with torch.no_grad():
            error = of_g.rounded() - of_g.values
        # Rounded is an orthogonal transform of the gradient, and its transpose undoes it.
        (before_transform,) = torch.autograd.grad(of_g.values, whole, error)
    return before_transform
