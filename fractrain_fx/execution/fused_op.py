"""Quantize, contract, quantize the gradient: one op of the graph as one autograd Function.

It saves the unrounded operands, which the model holds anyway, and rounds them again in backward. Rounded copies live
only while they are multiplied, but for a small weight's, which is saved. Some operands are not even saved, but made
again (``execution/remade.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fractrain_fx.execution.codes.choice import Int8Choice, needs_of
from fractrain_fx.execution.compiled_call import CalledStrategy, number_of
from fractrain_fx.execution.remade import Made, Maker
from fractrain_fx.execution.simulated.arithmetic import Arithmetic, Needs
from fractrain_fx.execution.simulated.operand import Factor, Rounds, factor
from fractrain_fx.execution.simulated.per_product import PER_PRODUCT, choice_gradient
from fractrain_fx.execution.simulated.short_path import weight_range
from fractrain_fx.execution.simulated.strategy import CALL_TENSORS, FIRST, SECOND, SIMULATED, Call, Plan, Strategy
from fractrain_fx.execution.torchao.linear import TorchaoLinear
from fractrain_fx.formats import ValueRange
from fractrain_fx.nn.quantizers import ActivationQuantizer, GradientQuantizer, WeightQuantizer
from fractrain_fx.nn.rounding import gradients_unrounded, refuse_create_graph

__all__ = ["FusedOp"]

Quantizer = ActivationQuantizer | WeightQuantizer


class FusedOp(nn.Module):
    """One contraction and the quantize nodes around it, with the same numbers, in one autograd Function.

    The quantizers stay registered where the quantize pass put them; this module only refers to them.

    Args:
        arithmetic: the contraction.
        static: its arguments that are not tensors, as :meth:`Arithmetic.bind` gives them.
        first: quantizer of the first factor.
        second: quantizer of the second factor, which is a weight or an activation.
        gradient: quantizer of the output's gradient.
    """

    def __init__(
        self,
        arithmetic: Arithmetic,
        static: tuple[Any, ...],
        first: Quantizer,
        second: Quantizer,
        gradient: GradientQuantizer,
    ) -> None:
        super().__init__()
        self.training = gradient.training
        # In a tuple, which torch does not register as children: their state must not get a second name.
        self._quantizers = (first, second, gradient)
        first_factor, second_factor = (factor(each, arithmetic.order) for each in (first, second))
        self.plan = Plan(arithmetic, static, first_factor, second_factor, gradient.fmt, gradient.axis)
        """Everything about the op except its tensors."""
        self.int8: Int8Choice | None = None
        """The choice between int8 and float, if the pass ``UseInt8`` set one."""
        self.torchao: TorchaoLinear | None = None
        """The layer of torchao that computes the op instead, if the pass ``UseTorchao`` set one."""
        self.maker: Maker | None = None
        """Can make the first factor again, if the pass ``RemakeOperands`` set it."""
        self._number = number_of(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._number = number_of(self)  # a copy is another op, and another process has other numbers

    def extra_repr(self) -> str:
        return "\n".join(f"{product}: {words}" for product, words in self.plan.fmt.products().items())

    def forward(
        self,
        controls: tuple[Tensor, Tensor, Tensor],
        choice: Float[Tensor, "batch options"] | None,
        ranges: tuple[ValueRange | None, ValueRange | None],
        seed: Int[Tensor, ""],
        a: Float[Tensor, "*a"],
        b: Float[Tensor, "*b"],
        added: Float[Tensor, "*added"] | None,
        made: Made | None = None,
    ) -> Float[Tensor, "*out"]:
        """Contract with rounded operands.

        Args:
            controls: for both factors and the gradient, the width, or the option that each sample has picked.
            choice: the block's choice, which may need a gradient.
            ranges: ranges of the factors that are activations; ``None`` for weights.
            seed: seed of this step's noise.
            a: first factor, unrounded.
            b: second factor, unrounded.
            added: the term that is added to the product.
            made: the value in whose memory ``a`` may lie, if it can be made again.
        """
        if self.torchao is not None:
            return self.torchao(a, b, added)
        plan, compiling = self.plan, torch.compiler.is_compiling()
        a_choice, b_choice, call = self.call_of(controls, choice, ranges, seed, a, b, added)
        strategy = self.simulated if self.int8 is None else self._strategy(self.int8, plan, call)
        tensors, measured_here = call.flatten()
        tensors = [a_choice, b_choice, *tensors]
        if compiling:
            tensors = _told_apart(tensors)
        again = None if made is None or self.maker is None or compiling else self.maker.recipe_of(a, made)
        recipe, sources = (None, ()) if again is None else again
        out: Tensor = _Fused.apply(*tensors, *sources, measured_here, plan, strategy, recipe)
        return out

    def call_of(
        self,
        controls: tuple[Tensor, Tensor, Tensor],
        choice: Tensor | None,
        ranges: tuple[ValueRange | None, ValueRange | None],
        seed: Tensor,
        a: Tensor,
        b: Tensor,
        added: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None, Call]:
        """The choices of both factors that get a gradient, and the tensors of a call with these arguments."""
        first, second, gradient = self._quantizers
        plan = self.plan
        ahead = not torch.compiler.is_compiling() and self.int8 is None and plan.by_kernels
        a_choice, of_a = _rounds(first, controls[0], choice, ranges[0], a, plan.first if ahead else None, FIRST)
        b_choice, of_b = _rounds(second, controls[1], choice, ranges[1], b, plan.second if ahead else None, SECOND)
        bits = gradient.bits_of(controls[2]) if self.training else None
        seed_here = gradient.seed_of(seed) if self.training else None
        return a_choice, b_choice, Call(a, b, added, of_a, of_b, bits, seed_here)

    def chosen(self, plan: Plan, call: Call, needs: Needs) -> Strategy:
        """How to compute a call whose tensors do not say which gradients they need."""
        return self.simulated if self.int8 is None else self.int8.strategy(plan, call, needs)

    @property
    def simulated(self) -> Strategy:
        """How the op multiplies in float."""
        return PER_PRODUCT if self.plan.fmt.per_product else SIMULATED

    def _strategy(self, int8: Int8Choice, plan: Plan, call: Call) -> Strategy:
        if not torch.compiler.is_compiling():
            return int8.strategy(plan, call)
        return CalledStrategy(self._number, needs_of(call)) if _is_plain(call) else SIMULATED


def _is_plain(call: Call) -> bool:
    """Whether a compiled graph may leave a call to eager mode: in float32 on a CPU, where compiling gains little."""
    tensors = [x for x in (call.a, call.b, call.added) if x is not None]
    plain = all(x.is_cpu and x.dtype == torch.float32 for x in tensors) and not torch.is_autocast_enabled("cpu")
    return plain and (call.bits is not None or not torch.is_grad_enabled())


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in a type; ``x.to`` takes as long as a small op even if ``x`` has that type."""
    return x if x.dtype == dtype else x.to(dtype)


def _told_apart(tensors: list[Tensor | None]) -> list[Tensor | None]:
    """The tensors, with views in place of repetitions: Dynamo rejects a Function that gets one tensor twice."""
    distinct: list[Tensor | None] = []
    for each in tensors:
        twice = each is not None and any(each is other for other in distinct)
        distinct.append(each.view_as(each) if twice and each is not None else each)
    return distinct


def _of_choice(plan: Plan, call: Call, slot: int, g: Tensor) -> Tensor:
    """The gradient of every option of every sample, from that of the factor that was rounded by choice."""
    if plan.fmt.per_product:
        return choice_gradient(plan, call, slot, g)
    factor, x, rounds = (plan.first, call.a, call.of_a) if slot == FIRST else (plan.second, call.b, call.of_b)
    return factor.of_choice(x, g, rounds)


def _rounds(
    quantizer: Quantizer,
    control: Tensor,
    choice: Tensor | None,
    within: ValueRange | None,
    x: Tensor,
    ahead: Factor | None,
    slot: int,
) -> tuple[Tensor | None, Rounds]:
    """A factor's choice, and how it is rounded; with ``ahead``, a weight may be rounded while it is measured."""
    if isinstance(quantizer, WeightQuantizer):
        if quantizer.frozen is not None:
            return None, Rounds(quantizer.frozen.bits, quantizer.frozen.within)
        found = None if ahead is None else weight_range(ahead, x, control, slot)
        return None, Rounds(control, found or quantizer.fmt.weight_range(x.detach(), dim=quantizer.dim))
    assert within is not None
    return (None if choice is None else quantizer.choice_of(choice)), Rounds(quantizer.bits_of(control), within)


class _Fused(torch.autograd.Function):
    """Inputs: the choices of both factors, the results of :meth:`Call.flatten`, the plan, the strategy and a recipe.

    The recipe makes the first factor again in backward from the sources, the tensors behind those of the call.
    """

    @staticmethod
    def forward(ctx: Any, a_choice: Tensor | None, b_choice: Tensor | None, *rest: Any) -> Tensor:
        *tensors, ctx.measured_here, ctx.plan, ctx.strategy, ctx.recipe = rest
        tensors, sources = tensors[:CALL_TENSORS], tensors[CALL_TENSORS:]
        call, plan = Call.unflatten(tensors, ctx.measured_here), ctx.plan
        ctx.choices = tuple(None if each is None else each.dtype for each in (a_choice, b_choice))
        ctx.types = call.a.dtype, call.b.dtype
        out, of_first, of_second = ctx.strategy.forward(plan, call)
        ctx.sources = len(sources)
        a = call.a if ctx.recipe is None else None
        ctx.save_for_backward(a, call.b, *tensors[2:], of_first, of_second, *sources)
        # Detached: some products are views, and autograd forbids in-place ops on a view that a Function returns.
        detached: Tensor = out.detach()
        return detached

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_create_graph()
        tensors = list(ctx.saved_tensors)
        of_first, of_second, *sources = tensors[CALL_TENSORS:]
        del tensors[CALL_TENSORS:]
        if ctx.recipe is not None:
            tensors[0] = ctx.recipe.make(*sources)
        plan, call = ctx.plan, Call.unflatten(tensors, ctx.measured_here)
        a, b, added = call.a, call.b, call.added
        if gradients_unrounded():
            call = call._replace(bits=None)
        needs = tuple(ctx.needs_input_grad[2:5])
        needs = (needs[0] or ctx.choices[0] is not None, needs[1] or ctx.choices[1] is not None, needs[2])
        of_a, of_b, of_added = ctx.strategy.backward(plan, call, grads[0], (of_first, of_second), needs)
        choices: list[Tensor | None] = [None, None]
        if ctx.choices[0] is not None and of_a is not None:
            choices[0] = _as(_of_choice(plan, call, FIRST, of_a), ctx.choices[0])
        if ctx.choices[1] is not None and of_b is not None:
            choices[1] = _as(_of_choice(plan, call, SECOND, of_b), ctx.choices[1])
        return (
            *choices,
            None if of_a is None else plan.first.gradient(a, _as(of_a, ctx.types[0]), call.of_a.bits),
            None if of_b is None else plan.second.gradient(b, _as(of_b, ctx.types[1]), call.of_b.bits),
            None if of_added is None or added is None else _as(of_added, added.dtype),
            *[None] * (len(tensors) - 3),
            *[None] * (ctx.sources + 4),
        )
