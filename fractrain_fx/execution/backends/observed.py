"""A backend that shows the tensors of each call to an observer, and computes as another backend does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fractrain_fx.execution.arithmetic import Gradients, Needs
from fractrain_fx.execution.plan import Backend, Call, Computed, Kept, Plan

__all__ = ["ObservedBackend", "Observer"]


class Observer(Protocol):
    """Looks at the operands of an op in one training step. It must neither write to them nor draw random numbers."""

    def forward(self, plan: Plan, call: Call, out: Tensor) -> None:
        """See a call and its output. Under activation checkpointing, backward makes the call once more."""
        ...

    def backward(self, plan: Plan, call: Call, g: Tensor, needs: Needs) -> None:
        """See the gradient of the output, before it is rounded."""
        ...


@dataclass(frozen=True)
class ObservedBackend:
    """Computes an op by ``backend``."""

    backend: Backend
    observer: Observer
    name = "observed"

    def refuses(self, plan: Plan, call: Call, needs: Needs) -> str | None:
        return self.backend.refuses(plan, call, needs)

    def forward(self, plan: Plan, call: Call) -> Computed:
        out, kept = self.backend.forward(plan, call)
        self.observer.forward(plan, call, out)
        return out, kept

    def backward(self, plan: Plan, call: Call, g: Tensor, kept: tuple[Kept, Kept], needs: Needs) -> Gradients:
        self.observer.backward(plan, call, g, needs)  # first: backends may reuse its memory
        return self.backend.backward(plan, call, g, kept, needs)
