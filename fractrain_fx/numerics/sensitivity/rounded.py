"""The rounding errors of an op's operands at a width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fractrain_fx.config.precision import FLOAT_BITS
from fractrain_fx.execution.plan import Call, Plan, Rounds
from fractrain_fx.execution.rounded import FIRST, SECOND
from fractrain_fx.execution.roundings import Rounding, forward_roundings, gradient_roundings

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
    full = torch.full_like(width, FLOAT_BITS)
    widths = (width, full) if slot == FIRST else (full, width)
    of_a, of_b = (Rounds(width, old.within) for width, old in zip(widths, (call.of_a, call.of_b), strict=True))
    call = call._replace(of_a=of_a, of_b=of_b)

    def rounding(x: Tensor) -> Rounding:
        return forward_roundings(plan, call._replace(a=x) if slot == FIRST else call._replace(b=x))[slot]

    return _error_of(rounding, x)


@torch.no_grad()
def gradient_errors(plan: Plan, call: Call, g: Tensor, bits: int, seed: Tensor) -> GradientErrors:
    """The rounding errors of an output gradient; the same in both products unless the format rounds it anew."""
    call = call._replace(bits=torch.tensor(bits, dtype=torch.int32, device=g.device), seed=seed)
    by_second = _gradient_error(plan, call, g, SECOND)
    return GradientErrors(by_second, _gradient_error(plan, call, g, FIRST) if plan.fmt.per_product else by_second)


def _gradient_error(plan: Plan, call: Call, g: Tensor, slot: int) -> Tensor:
    """The error that rounding adds to ``g`` in its product with the factor ``slot``."""

    def rounding(g: Tensor) -> Rounding:
        of_g, _ = gradient_roundings(plan, call, g, slot, call.seed)
        assert of_g is not None
        return of_g

    return _error_of(rounding, g)


def _error_of(rounding: Callable[[Tensor], Rounding], x: Tensor) -> Tensor:
    """The error that rounding adds to an operand. An orthogonal transform before it is undone by its transpose."""
    with torch.enable_grad():
        whole = x.detach().requires_grad_()
        of_x = rounding(whole)
        with torch.no_grad():
            error = of_x.rounded().to(of_x.values.dtype) - of_x.values
        (before_transform,) = torch.autograd.grad(of_x.values, whole, error)
    return before_transform
