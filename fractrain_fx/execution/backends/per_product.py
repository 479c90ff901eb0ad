"""A product in a format that rounds a tensor anew for each of the three products: forward, and the two gradients.

The first factor is ``x`` and the second is ``w``, unless the first is the op's weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fractrain_fx.config.precision import FLOAT_BITS
from fractrain_fx.execution.arithmetic import Bound, Gradients, Needs
from fractrain_fx.execution.axes import Dims, of_first, of_output, of_second, positions
from fractrain_fx.execution.plan import NOTHING_KEPT, Call, Computed, Factor, Plan, Rounds, contract
from fractrain_fx.execution.rounded import FIRST, SECOND
from fractrain_fx.formats import Operand
from fractrain_fx.formats.bits import of_options, put_where, sum_of_samples, work_dtype
from fractrain_fx.formats.noise import APART, draw_seed
from fractrain_fx.nn.rounding import gradients_unrounded, of_mean_loss

__all__ = ["backward", "choice_gradient", "forward", "forward_factors", "gradient_error"]

ProductName = Literal["forward", "input_gradient", "weight_gradient"]


def forward(plan: Plan, call: Call) -> Computed:
    """Round both factors for the forward product, and multiply."""
    first, second = forward_factors(plan, call)
    return contract(plan, call, first, second), NOTHING_KEPT


def backward(plan: Plan, call: Call, g: Tensor, needs: Needs) -> Gradients:
    """Round the output's gradient and one factor for each of two products.

    What is added to the product gets the sum of the unrounded output gradient.
    """
    arithmetic, static = plan.arithmetic, plan.static
    if gradients_unrounded():
        first, second = (each.to(g.dtype) for each in forward_factors(plan, call))
        return arithmetic.backward(g, Bound(first, second, call.added, static), needs)
    g = _without_skipped(plan, call, g)
    # Under autocast the product was taken in a half type, and so are its gradients.
    a, b = call.a.to(g.dtype), call.b.to(g.dtype)
    seed = draw_seed(g.device) if call.seed is None and call.bits is not None else call.seed
    of_a = of_b = of_added = None
    if needs[0]:
        error, other = _gradient_operands(plan, call, g, SECOND, seed)
        of_a = arithmetic.backward(error, Bound(a, other, call.added, static), (True, False, False))[0]
    if needs[1]:
        error, other = _gradient_operands(plan, call, g, FIRST, seed)
        of_b = arithmetic.backward(error, Bound(other, b, call.added, static), (False, True, False))[1]
    if needs[2]:
        of_added = arithmetic.backward(g, Bound(a, b, call.added, static), (False, False, True))[2]
    return of_a, of_b, of_added


def gradient_error(plan: Plan, call: Call, g: Tensor, slot: int) -> Tensor:
    """What rounding adds to ``g`` in its product with the factor ``slot``; after the transform, if there is one."""
    bits = call.bits
    assert bits is not None and call.seed is not None
    exact = call._replace(bits=torch.full_like(bits, FLOAT_BITS))
    rounded, unrounded = (_gradient_operands(plan, each, g, slot, call.seed)[0] for each in (call, exact))
    return rounded - unrounded


def choice_gradient(plan: Plan, call: Call, slot: int, g: Tensor) -> Tensor:
    """The gradient of each option of each sample (``nn.rounding.gate_gradient``), as the forward product rounds.

    Args:
        plan: of the op.
        call: its tensors.
        slot: the factor that the samples' choices rounded.
        g: its gradient.
    """
    factor, x, rounds = _of(plan, call, slot)
    samples = len(rounds.bits)
    dims, dtype = _summed_forward(plan, call, slot), work_dtype(x)

    def gains(widths: Sequence[int]) -> Tensor:
        found = []
        for bits in widths:
            error = _factor(plan, call, slot, "forward", dims, x, torch.tensor(bits, device=x.device)).to(dtype) - x
            found.append(sum_of_samples(factor.axis.apart(error * g, samples), factor.estimate == "fisher"))
        return torch.stack(found, dim=1)

    return of_mean_loss(of_options(factor.widths, gains), samples, factor.estimate)


def forward_factors(plan: Plan, call: Call) -> tuple[Tensor, Tensor]:
    """Both factors, rounded for the forward product."""
    summed = of_output(plan.arithmetic, call.a, call.b)
    first = _factor(plan, call, FIRST, "forward", summed.first, call.a)
    return first, _factor(plan, call, SECOND, "forward", summed.second, call.b)


def _gradient_operands(plan: Plan, call: Call, g: Tensor, slot: int, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """The rounded operands of the product of ``g`` and the factor ``slot``, which gives the other factor's gradient."""
    _, x, rounds = _of(plan, call, slot)
    # Of two activations the second stands for the weight.
    product: ProductName = "weight_gradient" if (slot == SECOND) == plan.first.weight else "input_gradient"
    summed, other = of_first(plan.arithmetic, g, call.b), of_second(plan.arithmetic, g, call.a, call.b)
    if slot == FIRST:
        summed, other = other, summed
    own = call.bits if plan.fmt.by_product and call.bits is not None else rounds.bits
    if call.bits is not None and seed is not None:
        bits = (call.bits, own)
        if summed.one is not None:
            g, x = plan.fmt.transform(product, g, x, summed.one, bits, seed + 2 * APART)
        axis = plan.axis.at(g.shape, len(call.bits)) if call.bits.ndim else plan.axis
        of = Operand(product, "g", summed.first, axis, across=other.first, positions=positions(plan.arithmetic, g))
        g = plan.fmt.operand(g, axis.expand(call.bits, g.shape), of, seed=seed)
    return g, _factor(plan, call, slot, product, summed.second, x, own).to(g.dtype)


def _factor(
    plan: Plan, call: Call, slot: int, product: ProductName, along: Dims, x: Tensor, bits: Tensor | None = None
) -> Tensor:
    """A factor (transformed, perhaps) rounded for one product, at ``bits`` instead of its own where they are given."""
    factor, _, rounds = _of(plan, call, slot)
    bits = rounds.bits if bits is None else bits
    tensor: Literal["x", "w"] = "w" if (slot == FIRST) == plan.first.weight else "x"
    across = _read_across(plan, call, slot, product)
    window = positions(plan.arithmetic, x)
    of = Operand(product, tensor, along, None, factor.channel, across, factor.weight, window)
    return factor.fmt.operand(x, bits if factor.weight else factor.axis.expand(bits, x.shape), of)


def _summed_forward(plan: Plan, call: Call, slot: int) -> Dims:
    """The dimensions of a factor that the forward product sums over."""
    summed = of_output(plan.arithmetic, call.a, call.b)
    return summed.first if slot == FIRST else summed.second


def _read_across(plan: Plan, call: Call, slot: int, product: ProductName) -> Dims:
    """The dimensions that the other product which reads a factor sums over."""
    if product != "forward":
        return _summed_forward(plan, call, slot)
    if slot == SECOND:
        return of_first(plan.arithmetic, call.a, call.b).second
    return of_second(plan.arithmetic, call.b, call.a, call.b).second


def _of(plan: Plan, call: Call, slot: int) -> tuple[Factor, Tensor, Rounds]:
    return (plan.first, call.a, call.of_a) if slot == FIRST else (plan.second, call.b, call.of_b)


def _without_skipped(plan: Plan, call: Call, g: Tensor) -> Tensor:
    """Exactly zero for samples at 0 bits, whose block is skipped."""
    if call.bits is None or not call.bits.ndim:
        return g
    axis = plan.axis.at(g.shape, len(call.bits))
    return put_where(axis.expand(call.bits, g.shape), (0,), 0.0, g.clone())
