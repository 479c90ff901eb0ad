"""A product in a format that rounds a tensor anew for each of the three products: forward, and the two gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fractrain_fx.execution.arithmetic import Bound, Gradients, Needs
from fractrain_fx.execution.plan import NOTHING_KEPT, Call, Computed, Plan, contract
from fractrain_fx.execution.rounded import FIRST, SECOND
from fractrain_fx.execution.roundings import (
    factor_of,
    forward_roundings,
    gradient_roundings,
    mixed_rows,
    without_skipped,
)
from fractrain_fx.formats.bits import of_options, sum_of_samples, work_dtype
from fractrain_fx.formats.microscaling.hadamard import rotate
from fractrain_fx.formats.noise import draw_seed
from fractrain_fx.nn.rounding import gradients_unrounded, of_mean_loss

__all__ = ["backward", "choice_gradient", "forward"]


def forward(plan: Plan, call: Call) -> Computed:
    """Round both factors for the forward product, and multiply."""
    first, second = (rounding.rounded() for rounding in forward_roundings(plan, call))
    return contract(plan, call, first, second), NOTHING_KEPT


def backward(plan: Plan, call: Call, g: Tensor, needs: Needs) -> Gradients:
    """Round the output's gradient and one factor for each of two products.

    What is added to the product gets the sum of the unrounded output gradient.
    """
    arithmetic, static = plan.arithmetic, plan.static
    if gradients_unrounded():
        first, second = (rounding.rounded().to(g.dtype) for rounding in forward_roundings(plan, call))
        return arithmetic.backward(g, Bound(first, second, call.added, static), needs)
    g = without_skipped(plan, call, g)
    # Under autocast the product was taken in a half type, and so are its gradients.
    a, b = call.a.to(g.dtype), call.b.to(g.dtype)
    seed = draw_seed(g.device) if call.seed is None and call.bits is not None else call.seed
    of_a = of_b = of_added = None
    if needs[0]:
        error, other = _gradient_operands(plan, call, g, SECOND, seed)
        of_a = arithmetic.backward(error, Bound(a, other, call.added, static), (True, False, False))[0]
        of_a = _with_rows_apart(plan, call, g, SECOND, of_a)
    if needs[1]:
        error, other = _gradient_operands(plan, call, g, FIRST, seed)
        of_b = arithmetic.backward(error, Bound(other, b, call.added, static), (False, True, False))[1]
        of_b = _with_rows_apart(plan, call, g, FIRST, of_b)
    if needs[2]:
        of_added = arithmetic.backward(g, Bound(a, b, call.added, static), (False, False, True))[2]
    return of_a, of_b, of_added


def choice_gradient(plan: Plan, call: Call, slot: int, g: Tensor) -> Tensor:
    """The gradient of each option of each sample (``nn.rounding.gate_gradient``), as the forward product rounds.

    Args:
        plan: of the op.
        call: its tensors.
        slot: the factor that the samples' choices rounded.
        g: its gradient.
    """
    factor, x, rounds = factor_of(plan, call, slot)
    samples, dtype = len(rounds.bits), work_dtype(x)
    how = forward_roundings(plan, call)[0 if slot == FIRST else 1]

    def gains(widths: Sequence[int]) -> Tensor:
        sums = []
        for bits in widths:
            error = how.fmt.operand(x, torch.tensor(bits, device=x.device), how.of).to(dtype) - x
            sums.append(sum_of_samples(factor.axis.apart(error * g, samples), factor.estimate == "fisher"))
        return torch.stack(sums, dim=1)

    return of_mean_loss(of_options(factor.widths, gains), samples, factor.estimate)


def _with_rows_apart(plan: Plan, call: Call, g: Tensor, slot: int, product: Tensor | None) -> Tensor | None:
    """The product of ``g`` and the factor ``slot`` after the transform of its rows is undone."""
    rows = None if product is None else mixed_rows(plan, call, g, slot)
    if product is None or rows is None:
        return product
    return rotate(product, rows.of_product, rows.matrix)


def _gradient_operands(plan: Plan, call: Call, g: Tensor, slot: int, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """The rounded operands of the product of ``g`` and the factor ``slot``, which gives the other factor's gradient."""
    of_g, other = gradient_roundings(plan, call, g, slot, seed)
    rounded = g if of_g is None else of_g.rounded()
    return rounded, other.rounded().to(rounded.dtype)
