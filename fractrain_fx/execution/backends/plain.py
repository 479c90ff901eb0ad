"""Plain torch operations: any format, any device, in eager mode and in graphs of ``torch.compile``."""

from __future__ import annotations

from torch import Tensor

from fractrain_fx.execution.arithmetic import Bound, Gradients, Needs
from fractrain_fx.execution.backends import per_product
from fractrain_fx.execution.plan import Call, Computed, Kept, Plan, contract
from fractrain_fx.execution.rounded import FIRST, GRADIENT, SECOND, round_again, round_factor
from fractrain_fx.formats.scratch import scratch
from fractrain_fx.nn.rounding import rounded_gradient

__all__ = ["PLAIN", "Plain"]


class Plain:
    """Rounds by the functions of the format, and multiplies the rounded values in float.

    A format that rounds a tensor anew for each product has :mod:`~fractrain_fx.execution.backends.per_product`.
    """

    name = "plain"

    def refuses(self, plan: Plan, call: Call, needs: Needs) -> str | None:
        return None

    def forward(self, plan: Plan, call: Call) -> Computed:
        if plan.fmt.per_product:
            return per_product.forward(plan, call)
        first = round_factor(plan.first, call.a, call.of_a, FIRST, plan.order(call.a, call.b))
        second = round_factor(plan.second, call.b, call.of_b, SECOND)
        out = contract(plan, call, first.values, second.values)
        return out, (first.kept(plan.first, call.a), second.kept(plan.second, call.b))

    def backward(self, plan: Plan, call: Call, g: Tensor, kept: tuple[Kept, Kept], needs: Needs) -> Gradients:
        if plan.fmt.per_product:
            return per_product.backward(plan, call, g, needs)
        order = plan.order(call.a, call.b)
        if call.bits is not None:
            out = scratch(g, GRADIENT, order)
            g = rounded_gradient(plan.fmt, g, call.bits, plan.axis, call.seed, out)
        # Under autocast the product was computed in a half type, and so are its gradients.
        first = round_again(plan.first, call.a, call.of_a, kept[0], FIRST, order).to(g.dtype)
        second = round_again(plan.second, call.b, call.of_b, kept[1], SECOND).to(g.dtype)
        return plan.arithmetic.backward(g, Bound(first, second, call.added, plan.static), needs)


PLAIN = Plain()
