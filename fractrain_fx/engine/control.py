"""The strength of the cost term as a function of the error of cp (``GateConfig.control``)."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from fractrain_fx.config import Control, GateConfig

__all__ = ["ControlLaw"]


@dataclass(frozen=True)
class ControlLaw:
    """The strength of the cost term as a multiple of ``beta``, from the relative error of cp.

    The gates integrate every push, so ``sign`` never settles: cp swings about its target, and all samples swing with
    it. A push in proportion to the error fades as cp comes near. The task's gradient pushes too; without an integral,
    cp settles beside its target, where both pushes cancel. ``multiplier`` is dual ascent on the constraint that mean
    cost equals the target, with a proportional part (Stooke et al., arXiv 2007.03964). It may be negative.

    Attributes:
        control: the name of the law.
        gain: strength for an error of 100 per cent.
        integral_gain: increase of the integral in one optimizer step with an error of 100 per cent.
    """

    control: Control
    gain: float
    integral_gain: float

    @classmethod
    def of(cls, gate: GateConfig) -> ControlLaw:
        """The law that a configuration names."""
        return cls(gate.control, *gate.gains)

    @property
    def remembers(self) -> bool:
        """Whether the strength depends on the errors of earlier steps."""
        return self.integral_gain > 0

    def strength(self, error: Float[Tensor, ""], integral: Float[Tensor, ""] | float) -> Float[Tensor, ""]:
        """The multiple of ``beta``; positive if choices should become cheaper."""
        if self.control == "sign":
            return error.sign()
        push = self.gain * error + integral
        return push if self.control == "multiplier" else push.clamp(-1, 1)

    def integrate(self, integral: Float[Tensor, ""] | float, error: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """The integral after an optimizer step with this error.

        A bounded strength has a bounded integral, which therefore does not grow while the bound holds.
        """
        total = integral + self.integral_gain * error
        return total if self.control == "multiplier" else total.clamp(-1, 1)
