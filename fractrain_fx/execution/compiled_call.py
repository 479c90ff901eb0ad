"""Products of fused ops inside graphs that ``torch.compile`` made: one call each, which chooses as eager mode does.

Codes, the memory they lie in and the timing that chooses between them and floats are beyond torch's compiler. So it
sees an op of torch that takes tensors and gives one, and makes kernels for what lies between such ops.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fractrain_fx.execution.simulated.arithmetic import Bound, Gradients, Needs
from fractrain_fx.execution.simulated.strategy import Call, Made, Plan, Product, Rounds

__all__ = ["Chooser", "OpaqueProduct", "number_of"]


class Chooser(Protocol):
    """What a number stands for: an op."""

    def plan_in(self, training: bool) -> Plan:
        """Everything about it that is no tensor."""
        ...

    def chosen(self, plan: Plan, call: Call, needs: Needs) -> Product:
        """How to compute a call whose tensors do not say which gradients they need."""
        ...


# A compiled graph holds numbers, no objects.
_numbers = itertools.count()
_choosers: weakref.WeakValueDictionary[int, Chooser] = weakref.WeakValueDictionary()


def number_of(chooser: Chooser) -> int:
    """A new number for an op, good in this process for as long as the op is there."""
    number = next(_numbers)
    _choosers[number] = chooser
    return number


@dataclass(frozen=True)
class OpaqueProduct:
    """What the op of a number chooses, as ops that a compiled graph does not look into. Nothing but operands is kept.

    Attributes:
        number: of the op.
        needs: whether its factors and what is added need gradients.
    """

    number: int
    needs: Needs

    def forward(self, plan: Plan, call: Call) -> Made:
        return torch.ops.fractrain_fx.forward_of(self.number, self.needs, *_flat(call)), None, None

    def backward(
        self, plan: Plan, call: Call, g: Tensor, kept: tuple[Tensor | None, Tensor | None], needs: Needs
    ) -> Gradients:
        found = torch.ops.fractrain_fx.backward_of(self.number, self.needs, needs, g, *_flat(call))
        places = itertools.count()
        of_a, of_b, of_added = (found[next(places)] if each else None for each in needs)
        return of_a, of_b, of_added


_Flat = tuple[
    Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None
]


def _flat(call: Call) -> _Flat:
    return call.a, call.b, call.added, *call.of_a, *call.of_b, call.bits, call.seed


@torch.library.custom_op("fractrain_fx::forward_of", mutates_args=())
def _forward(
    number: int,
    needed: Sequence[bool],
    a: Tensor,
    b: Tensor,
    added: Tensor | None,
    a_bits: Tensor,
    a_lo: Tensor,
    a_span: Tensor,
    b_bits: Tensor,
    b_lo: Tensor,
    b_span: Tensor,
    bits: Tensor | None,
    seed: Tensor | None,
) -> Tensor:
    call = Call(a, b, added, Rounds(a_bits, a_lo, a_span), Rounds(b_bits, b_lo, b_span), bits, seed)
    plan, product = _chosen(number, call, needed)
    return product.forward(plan, call)[0].contiguous()


@_forward.register_fake
def _(number: int, needed: Sequence[bool], a: Tensor, b: Tensor, added: Tensor | None, *rest: Tensor | None) -> Tensor:
    plan = _choosers[number].plan_in(rest[-1] is not None)
    out = plan.arithmetic.forward(Bound(a, b, added, plan.static))
    return out.new_empty(out.shape)


@torch.library.custom_op("fractrain_fx::backward_of", mutates_args=())
def _backward(
    number: int,
    needed: Sequence[bool],
    asked: Sequence[bool],
    g: Tensor,
    a: Tensor,
    b: Tensor,
    added: Tensor | None,
    a_bits: Tensor,
    a_lo: Tensor,
    a_span: Tensor,
    b_bits: Tensor,
    b_lo: Tensor,
    b_span: Tensor,
    bits: Tensor | None,
    seed: Tensor | None,
) -> list[Tensor]:
    call = Call(a, b, added, Rounds(a_bits, a_lo, a_span), Rounds(b_bits, b_lo, b_span), bits, seed)
    plan, product = _chosen(number, call, needed)
    found = product.backward(plan, call, g, (None, None), _needs(asked))
    return [each.contiguous() for each in found if each is not None]


@_backward.register_fake
def _(
    number: int,
    needed: Sequence[bool],
    asked: Sequence[bool],
    g: Tensor,
    a: Tensor,
    b: Tensor,
    added: Tensor | None,
    *rest: Tensor | None,
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x, each in zip((a, b, added), asked, strict=True) if each and x is not None]


def _chosen(number: int, call: Call, needed: Sequence[bool]) -> tuple[Plan, Product]:
    chooser = _choosers[number]
    plan = chooser.plan_in(call.bits is not None)
    return plan, chooser.chosen(plan, call, _needs(needed))


def _needs(flags: Sequence[bool]) -> Needs:
    a, b, added = flags
    return a, b, added
