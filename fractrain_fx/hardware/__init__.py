"""What training costs on a machine."""

from fractrain_fx.hardware.machine import Choice, Machine, OpStep, StepCost, Traffic

__all__ = ["Choice", "Machine", "OpStep", "StepCost", "Traffic"]
