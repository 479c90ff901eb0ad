"""What each op costs at each precision, in the unit of a budget."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Literal

from fractrain_fx.config.precision import Precision
from fractrain_fx.errors import ConfigError
from fractrain_fx.hardware.catalogue import find_machine
from fractrain_fx.hardware.machine import Choice, Machine
from fractrain_fx.numerics.sensitivity import MeasuredOp, Sensitivities
from fractrain_fx.passes import Op

__all__ = ["Price", "Unit", "price_in"]

Unit = Literal["cp", "joules", "seconds"]


Price = Callable[[MeasuredOp, Precision], float]
"""The cost of an op at a precision."""


def price_in(unit: Unit, sensitivities: Sensitivities, machine: Machine | str | None, batch: int) -> Price:
    """The price of an op in a unit; for ``cp`` its share of ``cp_total``, in per cent.

    Raises:
        ConfigError: the unit is unknown, or it needs a machine that is not given, or does not say its energy.
    """
    if unit not in ("cp", "joules", "seconds"):
        raise ConfigError(f"unit={unit!r} is unknown: write cp, joules or seconds")
    if unit == "cp":
        if machine is not None:
            raise ConfigError(
                "machine= changes nothing for unit='cp': write unit='seconds' or 'joules', or leave it out"
            )
        total = sum(sum(op.macs) for op in sensitivities.ops)
        return lambda op, precision: 100 * sum(op.cost.spent(precision)) / total
    if machine is None:
        raise ConfigError(f"unit={unit!r} needs a machine, such as machine='h200' ('fractrain machines' lists them)")
    return cache(partial(_step_price, unit, find_machine(machine), batch))


def _step_price(unit: Unit, machine: Machine, batch: int, op: MeasuredOp, precision: Precision) -> float:
    """The time or energy of a training step on a machine."""
    forward, input_gradient, weight_gradient = op.macs
    work = Op(
        op.name,
        op.kind,
        op.module,
        forward,
        input_gradient=bool(input_gradient),
        weight_gradient=bool(weight_gradient),
        product=op.product,
    )
    choice = Choice(precision, None, op.format, least=op.least, by_product=op.by_product)
    step = machine.step([work], {op.name: (choice,)}, batch=batch)
    if op.name not in step.ops:
        return 0.0  # an op without a price on the machine costs nothing at any precision
    if unit == "seconds":
        return step.seconds
    if step.joules is None:
        raise ConfigError(f"machine {machine.name!r} does not say what {op.name!r} takes in joules")
    return step.joules
