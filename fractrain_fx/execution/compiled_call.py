"""Fused ops in graphs of ``torch.compile``: one call each, which chooses between codes and float as in eager mode.

torch's compiler cannot trace codes, the memory that they lie in, or the timing that chooses between codes and floats.
So it sees an opaque op from tensors to a tensor, and makes kernels for the ops between such calls.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

from fractrain_fx.execution.arithmetic import Bound, Gradients, Needs
from fractrain_fx.execution.plan import NOTHING_KEPT, Backend, Call, Computed, Kept, Plan

if TYPE_CHECKING:
    from fractrain_fx.execution.fused_op import FusedOp

__all__ = ["CalledBackend", "number_of"]


# A compiled graph holds tensors and not objects. A number that is a tensor may be another one at each call, so equal
# ops can run what was compiled for one of them.
_numbers = itertools.count()
_ops: weakref.WeakValueDictionary[int, FusedOp] = weakref.WeakValueDictionary()


def number_of(op: FusedOp) -> Int[Tensor, ""]:
    """A new number for an op, valid in this process while the op exists."""
    number = next(_numbers)
    _ops[number] = op
    return torch.tensor(number, device="cpu")


@dataclass(frozen=True)
class CalledBackend:
    """The backend that an op chooses, called through custom ops that torch's compiler does not trace.

    Only operands are saved for backward.

    Attributes:
        number: the op's number, which is read when the op runs.
        needs: whether both factors and the added term need gradients.
    """

    number: Int[Tensor, ""]
    needs: Needs
    name = "called"

    def refuses(self, plan: Plan, call: Call, needs: Needs) -> str | None:
        return None

    def forward(self, plan: Plan, call: Call) -> Computed:
        # The compiler drops this product, of which only the size is read.
        size = plan.arithmetic.forward(Bound(call.a, call.b, call.added, plan.static)).shape
        return torch.ops.fractrain_fx.forward_of(self.number, size, self.needs, *call.flatten()), NOTHING_KEPT

    def backward(self, plan: Plan, call: Call, g: Tensor, kept: tuple[Kept, Kept], needs: Needs) -> Gradients:
        gradients = torch.ops.fractrain_fx.backward_of(self.number, self.needs, needs, g, *call.flatten())
        places = itertools.count()
        of_a, of_b, of_added = (gradients[next(places)] if need else None for need in needs)
        return of_a, of_b, of_added


@torch.library.custom_op("fractrain_fx::forward_of", mutates_args=())
def _forward(
    number: Tensor,
    size: Sequence[int],
    needed: Sequence[bool],
    tensors: Sequence[Tensor | None],
    measured_here: Sequence[bool],
) -> Tensor:
    plan, backend, call = _chosen(number, needed, tensors, measured_here)
    return backend.forward(plan, call)[0].contiguous()


@_forward.register_fake
def _(number: Tensor, size: Sequence[int], *_: Any) -> Tensor:
    return number.new_empty(size, dtype=torch.float32)


@torch.library.custom_op("fractrain_fx::backward_of", mutates_args=())
def _backward(
    number: Tensor,
    needed: Sequence[bool],
    asked: Sequence[bool],
    g: Tensor,
    tensors: Sequence[Tensor | None],
    measured_here: Sequence[bool],
) -> list[Tensor]:
    plan, backend, call = _chosen(number, needed, tensors, measured_here)
    gradients = backend.backward(plan, call, g, NOTHING_KEPT, _needs(asked))
    return [gradient.contiguous() for gradient in gradients if gradient is not None]


@_backward.register_fake
def _(
    number: Tensor, needed: Sequence[bool], asked: Sequence[bool], g: Tensor, tensors: Sequence[Tensor | None], *_: Any
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x, need in zip(tensors[:3], asked, strict=True) if need and x is not None]


def _chosen(
    number: Tensor, needed: Sequence[bool], tensors: Sequence[Tensor | None], measured_here: Sequence[bool]
) -> tuple[Plan, Backend, Call]:
    op, call = _ops[int(number)], Call.unflatten(tensors, measured_here)
    return op.plan, op.choose(call, _needs(needed)), call


def _needs(flags: Sequence[bool]) -> Needs:
    a, b, added = flags
    return a, b, added
