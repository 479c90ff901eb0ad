"""C++ kernels round in format ``affine`` on a CPU, with little Python around them, and torch multiplies in float.

A model has a hundred such ops, so the time before each kernel starts adds up to some per cent of a step. A weight is
measured and rounded in one pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from fractrain_fx.execution.arithmetic import Bound, Gradients, Needs
from fractrain_fx.execution.backends.plain import PLAIN
from fractrain_fx.execution.plan import Call, Computed, Factor, Kept, Plan, Rounds
from fractrain_fx.execution.rounded import FIRST, GRADIENT, SECOND, WEIGHTS, Rounded, cached_rounding
from fractrain_fx.formats.scratch import Order, scratch
from fractrain_fx.kernels.affine import has_kernels, round_channels_compiled, round_compiled

if TYPE_CHECKING:
    from fractrain_fx.formats import AffineFormat, ValueRange

__all__ = ["CPU", "Cpu"]


class Cpu:
    """Rounds by C++ kernels. Where a range is not finite, the whole product is :class:`Plain`'s."""

    name = "cpu"

    def refuses(self, plan: Plan, call: Call, needs: Needs) -> str | None:
        if not plan.has_kernels("cpu"):
            return "does not round in format 'affine' by C++ kernels (run.backend='cpu')"
        if torch.compiler.is_compiling():
            return "is traced by torch.compile, which makes kernels of its own"
        if not (has_kernels(call.a, call.of_a.within and call.of_a.within.lo) and has_kernels(call.b)):
            return "has operands on another device, of another type than float32, or without values"
        if torch.is_autocast_enabled("cpu"):
            return "runs under autocast"
        return None

    def forward(self, plan: Plan, call: Call) -> Computed:
        factors = _factors(plan, call, plan.order(call.a, call.b))
        if factors is None:
            return PLAIN.forward(plan, call)
        first, second = factors
        out = plan.arithmetic.forward(Bound(first.values, second.values, call.added, plan.static))
        return out, (_kept(plan.first, first), _kept(plan.second, second))

    def backward(self, plan: Plan, call: Call, g: Tensor, kept: tuple[Kept, Kept], needs: Needs) -> Gradients:
        order = plan.order(call.a, call.b)
        anew = call.bits is not None and kept[0].values is None and kept[1].values is None and has_kernels(g)
        factors = _factors(plan, _measured(call, kept), order) if anew else None
        rounded = None if factors is None else _gradient(plan, call, g, order)
        if factors is None or rounded is None:
            return PLAIN.backward(plan, call, g, kept, needs)
        first, second = factors
        return plan.arithmetic.backward(rounded, Bound(first.values, second.values, call.added, plan.static), needs)


CPU = Cpu()


def _factors(plan: Plan, call: Call, order: Order) -> tuple[Rounded, Rounded] | None:
    """Both rounded factors; ``None`` if a range is not finite."""
    first = _rounded(plan.first, call.a, call.of_a, FIRST, order)
    second = None if first is None else _rounded(plan.second, call.b, call.of_b, SECOND, plan.second.order)
    return None if first is None or second is None else (first, second)


def _rounded(factor: Factor, x: Tensor, rounds: Rounds, slot: int, order: Order) -> Rounded | None:
    bits, within = rounds
    if factor.weight:
        return _rounded_weight(factor, x, bits, within, scratch(x, WEIGHTS[slot], factor.order))
    if within is None or not has_kernels(x, within.lo):
        return None

    def rounded(out: Tensor | None) -> Tensor | None:
        return round_compiled(x, factor.axis.expand(bits, x.shape), within, out=out)

    values = cached_rounding(factor, x, rounds, slot, order, rounded)
    return None if values is None else Rounded(values, within)


def _rounded_weight(
    factor: Factor, w: Tensor, bits: Tensor, within: ValueRange | None, out: Tensor | None
) -> Rounded | None:
    if factor.frozen is not None:
        return None
    if within is None and factor.channel == 0 and w.is_contiguous() and out is not None:
        within, values = round_channels_compiled(w.detach(), bits, out)
    else:
        within = within or factor.fmt.weight_range(w.detach(), dim=factor.channel)
        values = round_compiled(w, bits, within, out=out)
    return None if values is None else Rounded(values, within)


def _kept(factor: Factor, rounded: Rounded) -> Kept:
    """The range of a weight. Its values are rounded again in backward, in one pass."""
    return Kept(None, rounded.within) if factor.weight else Kept()


def _measured(call: Call, kept: tuple[Kept, Kept]) -> Call:
    """The call with the ranges that forward measured."""
    of_a, of_b = (
        rounds if each.within is None else rounds._replace(within=each.within)
        for rounds, each in zip((call.of_a, call.of_b), kept, strict=True)
    )
    return call._replace(of_a=of_a, of_b=of_b)


def _gradient(plan: Plan, call: Call, g: Tensor, order: Order) -> Tensor | None:
    """The output's gradient, rounded with noise in its own range, and zero at 0 bits."""
    assert call.bits is not None
    fmt = cast("AffineFormat", plan.fmt)
    axis = plan.axis.of_bits(call.bits, g.shape)
    bits, out = axis.expand(call.bits, g.shape), scratch(g, GRADIENT, order)
    within = fmt.gradient_range(g, bits, axis)
    return round_compiled(g, bits, within, stochastic=True, seed=call.seed, erase=True, out=out)
