"""Quantize, contract, quantize the gradient: one op of the graph as one autograd Function.

It saves the unrounded operands, which the model holds anyway, and rounds them again in backward. Rounded copies live
only while they are multiplied, but for a small weight's, which is saved. Some operands are not even saved, but made
again (``execution/remade.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fractrain_fx.config import Precision
from fractrain_fx.execution.arithmetic import Arithmetic, Needs
from fractrain_fx.execution.backends.codes import CodedProducts
from fractrain_fx.execution.backends.cuda import CUDA
from fractrain_fx.execution.backends.observed import ObservedBackend, Observer
from fractrain_fx.execution.backends.per_product import choice_gradient
from fractrain_fx.execution.backends.plain import PLAIN
from fractrain_fx.execution.compiled_call import CalledBackend, number_of
from fractrain_fx.execution.plan import CALL_TENSORS, Backend, Call, Kept, Plan, Rounds, factor, range_of
from fractrain_fx.execution.remade import Made, Maker
from fractrain_fx.execution.rounded import FIRST, SECOND
from fractrain_fx.execution.roundings import factor_of
from fractrain_fx.formats import ValueRange
from fractrain_fx.nn.bits import OwnBits, StageBits
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
        first_factor, second_factor = (factor(quantizer, arithmetic.order) for quantizer in (first, second))
        self.plan = Plan(arithmetic, static, first_factor, second_factor, gradient.fmt, gradient.axis, gradient)
        """Everything about the op except its tensors."""
        self.backends: tuple[Backend, ...] = (CUDA, PLAIN)
        """What may compute the op, best first; at each call the first that does not refuse it does."""
        self.observer: Observer | None = None  # sees the next calls, if a watched step set it
        self.maker: Maker | None = None
        """Can make the first factor again, if the pass ``RemakeOperands`` set it."""
        self._stage: tuple[StageBits | OwnBits | Precision, ...] = ()
        self.used: str | None = None
        """The name of the backend that computed the last call in eager mode; ``None`` before one."""
        self.refused: dict[str, str] = {}
        """By name, why the backends that come before it did not."""
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
        plan, compiling = self.plan, torch.compiler.is_compiling()
        a_choice, b_choice, call = self.call_of(controls, choice, ranges, seed, a, b, added)
        if compiling:
            backend, call = self._traced(call)
        else:
            backend = self.choose(call, _needs_of(call))
            if self.observer is not None:
                backend = ObservedBackend(backend, self.observer)
        tensors, measured_here = call.flatten()
        tensors = [a_choice, b_choice, *tensors]
        if compiling:
            tensors = _told_apart(tensors)
        again = None if made is None or self.maker is None or compiling else self.maker.recipe_of(a, made)
        recipe, sources = (None, ()) if again is None else again
        out: Tensor = _Fused.apply(*tensors, *sources, measured_here, call.precision, plan, backend, recipe)
        return out

    def knows(self, stage: StageBits | OwnBits | Precision) -> None:
        """Let backends know the bits of each call on the host: those of the present stage, its own, or of a pin."""
        self._stage = (stage,)  # in a tuple, as the quantizers

    @property
    def precision(self) -> Precision | None:
        """The present bits, if backends are to know them on the host."""
        return next((bits if isinstance(bits, Precision) else bits.known for bits in self._stage), None)

    def choose(self, call: Call, needs: Needs) -> Backend:
        """The first backend that does not refuse a call of which ``needs`` gradients will be asked."""
        refused: dict[str, str] = {}
        for backend in self.backends:
            reason = backend.refuses(self.plan, call, needs)
            if reason is None:
                if not torch.compiler.is_compiling():
                    self.used, self.refused = backend.name, refused
                return backend
            refused[backend.name] = reason
        return PLAIN

    @property
    def codes(self) -> CodedProducts | None:
        """The backend of codes, if the op may have them."""
        return next((backend for backend in self.backends if isinstance(backend, CodedProducts)), None)

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
        a_choice, of_a = _rounds(first, controls[0], choice, ranges[0])
        b_choice, of_b = _rounds(second, controls[1], choice, ranges[1])
        bits = gradient.bits_of(controls[2]) if self.training else None
        seed_here = gradient.seed_of(seed) if self.training else None
        return a_choice, b_choice, Call(a, b, added, of_a, of_b, bits, seed_here, self.precision)

    def _traced(self, call: Call) -> tuple[Backend, Call]:
        """The backend in a compiled graph. An op that may run on codes is one call, for which the graph measures."""
        if self.precision is not None:
            return self.choose(call, _needs_of(call)), call
        if self.codes is None or not _is_plain(call):
            return PLAIN, call
        within = call.of_b.within or self.plan.second.fmt.weight_range(call.b.detach(), dim=self.plan.second.channel)
        return CalledBackend(self._number, _needs_of(call)), call._replace(of_b=Rounds(call.of_b.bits, within))


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
    for tensor in tensors:
        twice = tensor is not None and any(tensor is other for other in distinct)
        distinct.append(tensor.view_as(tensor) if twice and tensor is not None else tensor)
    return distinct


def _of_choice(plan: Plan, call: Call, slot: int, g: Tensor) -> Tensor:
    """The gradient of every option of every sample, from that of the factor that was rounded by choice."""
    if plan.fmt.per_product:
        return choice_gradient(plan, call, slot, g)
    chosen, x, rounds = factor_of(plan, call, slot)
    return chosen.of_choice(x, g, rounds)


def _rounds(
    quantizer: Quantizer, control: Tensor, choice: Tensor | None, within: ValueRange | None
) -> tuple[Tensor | None, Rounds]:
    """A factor's choice, and how it is rounded."""
    if isinstance(quantizer, WeightQuantizer):
        if quantizer.frozen is not None:
            return None, Rounds(quantizer.frozen.bits, quantizer.frozen.within)
        return None, Rounds(control, None)
    return (None if choice is None else quantizer.choice_of(choice)), Rounds(quantizer.bits_of(control), within)


def _needs_of(call: Call) -> Needs:
    """Which gradients a call will be asked for."""
    return call.a.requires_grad, call.b.requires_grad, call.added is not None and call.added.requires_grad


class _Fused(torch.autograd.Function):
    """Inputs: choices of both factors, results of :meth:`Call.flatten`, a precision, a plan, a backend and a recipe.

    The recipe makes the first factor again in backward from the sources, the tensors behind those of the call.
    """

    @staticmethod
    def forward(ctx: Any, a_choice: Tensor | None, b_choice: Tensor | None, *rest: Any) -> Tensor:
        *tensors, ctx.measured_here, ctx.precision, ctx.plan, ctx.backend, ctx.recipe = rest
        tensors, sources = tensors[:CALL_TENSORS], tensors[CALL_TENSORS:]
        call, plan = Call.unflatten(tensors, ctx.measured_here, ctx.precision), ctx.plan
        ctx.choices = tuple(None if choice is None else choice.dtype for choice in (a_choice, b_choice))
        ctx.types = call.a.dtype, call.b.dtype
        out, kept = ctx.backend.forward(plan, call)
        ctx.sources = len(sources)
        parts, ctx.kept_measured = _flattened(kept)
        ctx.save_for_backward(call.a if ctx.recipe is None else None, *tensors[1:], *parts, *sources)
        # Detached: some products are views, and autograd forbids in-place ops on a view that a Function returns.
        detached: Tensor = out.detach()
        return detached

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_create_graph()
        tensors = list(ctx.saved_tensors)
        kept = _unflattened(tensors[CALL_TENSORS : CALL_TENSORS + _KEPT], ctx.kept_measured)
        sources = tensors[CALL_TENSORS + _KEPT :]
        del tensors[CALL_TENSORS:]
        if ctx.recipe is not None:
            tensors[0] = ctx.recipe.make(*sources)
        plan, call = ctx.plan, Call.unflatten(tensors, ctx.measured_here, ctx.precision)
        if gradients_unrounded():
            call = call._replace(bits=None)
        if call.bits is not None and plan.gradient is not None:
            plan.gradient.measure(grads[0], call.bits)
        needs = tuple(ctx.needs_input_grad[2:5])
        needs = (needs[0] or ctx.choices[0] is not None, needs[1] or ctx.choices[1] is not None, needs[2])
        of_a, of_b, of_added = ctx.backend.backward(plan, call, grads[0], kept, needs)
        choices: list[Tensor | None] = [None, None]
        if ctx.choices[0] is not None and of_a is not None:
            choices[0] = _as(_of_choice(plan, call, FIRST, of_a), ctx.choices[0])
        if ctx.choices[1] is not None and of_b is not None:
            choices[1] = _as(_of_choice(plan, call, SECOND, of_b), ctx.choices[1])
        return (
            *choices,
            None if of_a is None else plan.first.gradient(call.a, _as(of_a, ctx.types[0]), call.of_a.bits),
            None if of_b is None else plan.second.gradient(call.b, _as(of_b, ctx.types[1]), call.of_b.bits),
            None if of_added is None or call.added is None else _as(of_added, call.added.dtype),
            *[None] * (len(tensors) - 3),
            *[None] * (ctx.sources + 5),
        )


_KEPT = 6  # tensors


def _flattened(kept: tuple[Kept, Kept]) -> tuple[list[Tensor | None], tuple[bool, bool]]:
    """The tensors of what is kept of both factors, and whether each range was measured on the factor."""
    tensors: list[Tensor | None] = []
    for values, within in kept:
        tensors += [values, None, None] if within is None else [values, within.lo, within.span]
    first, second = (within is not None and within.measured_here for _, within in kept)
    return tensors, (first, second)


def _unflattened(tensors: Sequence[Tensor | None], measured: tuple[bool, bool]) -> tuple[Kept, Kept]:
    a, a_lo, a_span, b, b_lo, b_span = tensors
    return Kept(a, range_of(a_lo, a_span, measured[0])), Kept(b, range_of(b_lo, b_span, measured[1]))
