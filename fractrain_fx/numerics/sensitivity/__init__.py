"""What rounding each operand of each op does to the loss."""

from fractrain_fx.numerics.sensitivity.measure import sensitivity
from fractrain_fx.numerics.sensitivity.result import MeasuredOp, Sensitivities, Sensitivity

__all__ = ["MeasuredOp", "Sensitivities", "Sensitivity", "sensitivity"]
