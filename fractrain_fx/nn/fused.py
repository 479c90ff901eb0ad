"""Quantize, contract, quantize the gradient: one op of the graph as one autograd Function.

By default it keeps the operands as they came, which the model holds anyway, and rounds them again in backward; the
rounded copies live only while they are multiplied.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fractrain_fx.config import Saved
from fractrain_fx.formats import Format
from fractrain_fx.formats.scratch import scratch
from fractrain_fx.nn.arithmetic import Arithmetic, Bound
from fractrain_fx.nn.axis import BatchAxis
from fractrain_fx.nn.factor import Factor, factor
from fractrain_fx.nn.quantizers import ActivationQuantizer, GradientQuantizer, WeightQuantizer
from fractrain_fx.nn.rounding import rounded_gradient

__all__ = ["FusedOp"]

# Entering torch.autocast costs as much as a small op.
_AS_IT_IS = nullcontext()

Range = tuple[Tensor, Tensor]
Quantizer = ActivationQuantizer | WeightQuantizer

# Where the rounded operands of the op at work lie.
_FIRST, _SECOND, _GRADIENT = range(3)


class FusedOp(nn.Module):
    """What the quantize nodes around one contraction do, in one autograd Function; the numbers are the same.

    The quantizers stay registered where the quantize pass put them; this module only refers to them.

    Args:
        arithmetic: the contraction.
        static: its arguments that are no tensors, as :meth:`Arithmetic.bind` gives them.
        first: quantizer of the first factor.
        second: quantizer of the second: a weight's or an activation's.
        gradient: quantizer of the output's gradient.
        saved: what is kept of activations between forward and backward.
    """

    def __init__(
        self,
        arithmetic: Arithmetic,
        static: tuple[Any, ...],
        first: Quantizer,
        second: Quantizer,
        gradient: GradientQuantizer,
        saved: Saved = "operands",
    ) -> None:
        super().__init__()
        self.training = gradient.training
        # In a tuple, which torch does not register as children: their state must not get a second name.
        self._quantizers = (first, second, gradient)
        matrices = arithmetic.matrices
        self._plans = {
            mode: _Plan(
                arithmetic,
                static,
                factor(first, mode, matrices, saved),
                factor(second, mode, matrices, saved),
                gradient.fmt,
                gradient.axis,
            )
            for mode in (True, False)
        }

    def forward(
        self,
        controls: tuple[Tensor, Tensor, Tensor],
        choice: Float[Tensor, "batch options"] | None,
        ranges: tuple[Range | None, Range | None],
        seed: Int[Tensor, ""],
        a: Float[Tensor, "*a"],
        b: Float[Tensor, "*b"],
        added: Float[Tensor, "*added"] | None,
    ) -> Float[Tensor, "*out"]:
        """Contract with rounded operands.

        Args:
            controls: what says the bits of both factors and of the gradient: a width, or what each sample has picked.
            choice: of the block, for its gradient.
            ranges: of the factors that are activations.
            seed: of this step's noise.
            a: first factor, unrounded.
            b: second factor, unrounded.
            added: to the product.
        """
        first, second, gradient = self._quantizers
        bits = gradient.bits_of(controls[2]) if self.training else None
        tensors = [
            a,
            b,
            added,
            *_rounding_of(first, controls[0], choice, ranges[0], a),
            *_rounding_of(second, controls[1], choice, ranges[1], b),
            bits,
            gradient.seed_of(seed) if self.training else None,
        ]
        if torch.compiler.is_compiling():
            tensors = _told_apart(tensors)
        out: Tensor = _Fused.apply(*tensors, self._plans[self.training])
        return out


@dataclass(frozen=True)
class _Plan:
    """Everything about a fused op that is no tensor."""

    arithmetic: Arithmetic
    static: tuple[Any, ...]
    first: Factor
    second: Factor
    fmt: Format
    axis: BatchAxis


def _told_apart(tensors: list[Tensor | None]) -> list[Tensor | None]:
    """The same tensors, none of them twice: Dynamo takes no Function that gets one in two places."""
    distinct: list[Tensor | None] = []
    for each in tensors:
        twice = each is not None and any(each is other for other in distinct)
        distinct.append(each.view_as(each) if twice and each is not None else each)
    return distinct


def _rounding_of(
    quantizer: Quantizer, control: Tensor, choice: Tensor | None, ends: Range | None, x: Tensor
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """A factor's choice, bits, and both ends of its range."""
    if isinstance(quantizer, WeightQuantizer):
        return None, control, *quantizer.fmt.weight_range(x.detach(), dim=quantizer.dim)
    assert ends is not None
    return (None if choice is None else quantizer.choice_of(choice)), quantizer.bits_of(control), *ends


def _cast(x: Any, dtype: torch.dtype) -> Any:
    """What autocast does to an argument of a product."""
    return x.to(dtype) if isinstance(x, Tensor) and x.dtype != torch.float64 else x


class _Fused(torch.autograd.Function):
    """Inputs: both factors, what is added; of each factor choice, bits, lo, span; bits and seed of the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor,
        added: Tensor | None,
        a_choice: Tensor | None,
        a_bits: Tensor,
        a_lo: Tensor,
        a_span: Tensor,
        b_choice: Tensor | None,
        b_bits: Tensor,
        b_lo: Tensor,
        b_span: Tensor,
        bits: Tensor | None,
        seed: Tensor | None,
        plan: _Plan,
    ) -> Tensor:
        ctx.plan = plan
        ctx.choices = tuple(None if each is None else each.dtype for each in (a_choice, b_choice))
        given = added
        first, of_first = plan.first.take(a, a_bits, a_lo, a_span, _FIRST)
        second, of_second = plan.second.take(b, b_bits, b_lo, b_span, _SECOND)
        ctx.types = a.dtype, b.dtype
        halved = torch.is_autocast_enabled(a.device.type)
        if halved:
            dtype = torch.get_autocast_dtype(a.device.type)
            first, second, added = _cast(first, dtype), _cast(second, dtype), _cast(added, dtype)
        operands = (
            a if plan.first.needed(of_first, a_choice is not None) else None,
            b if plan.second.needed(of_second, b_choice is not None) else None,
            given,
        )
        ranges = (a_bits, a_lo, a_span, b_bits, b_lo, b_span)
        ctx.save_for_backward(*operands, *ranges, bits, seed, of_first, of_second)
        call = Bound(first, second, added, plan.static)
        with torch.autocast(a.device.type, enabled=False) if halved else _AS_IT_IS:
            # Detached, as some products are views of their own memory, which autograd lets no op in place follow.
            return plan.arithmetic.forward(call).detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        a, b, added, a_bits, a_lo, a_span, b_bits, b_lo, b_span, bits, seed, of_first, of_second = ctx.saved_tensors
        plan: _Plan = ctx.plan
        (g,) = grads
        if bits is not None:
            g = rounded_gradient(
                plan.fmt, g, bits, plan.axis, seed, scratch(g, _GRADIENT, matrices=plan.arithmetic.matrices)
            )
        # Under autocast the product was taken in a half type, and so are its gradients.
        first = plan.first.again(a, of_first, a_bits, a_lo, a_span, _FIRST).to(g.dtype)
        second = plan.second.again(b, of_second, b_bits, b_lo, b_span, _SECOND).to(g.dtype)
        needs = tuple(ctx.needs_input_grad[:3])
        needs = (needs[0] or ctx.choices[0] is not None, needs[1] or ctx.choices[1] is not None, needs[2])
        found = plan.arithmetic.backward(g, Bound(first, second, added, plan.static), needs)
        of_a, of_b, of_added = found
        choices: list[Tensor | None] = [None, None]
        if ctx.choices[0] is not None and of_a is not None:
            choices[0] = plan.first.of_choice(a, of_a, a_lo, a_span, len(a_bits)).to(ctx.choices[0])
        if ctx.choices[1] is not None and of_b is not None:
            choices[1] = plan.second.of_choice(b, of_b, b_lo, b_span, len(b_bits)).to(ctx.choices[1])
        return (
            None if of_a is None else plan.first.gradient(a, of_a.to(ctx.types[0]), a_bits),
            None if of_b is None else plan.second.gradient(b, of_b.to(ctx.types[1]), b_bits),
            None if of_added is None or added is None else of_added.to(added.dtype),
            choices[0],
            *(None, None, None),
            choices[1],
            *(None, None, None),
            *(None, None, None),
        )
