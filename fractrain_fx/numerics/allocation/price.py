"""What each op costs at each precision, in the unit of a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Literal

from fractrain_fx.config.precision import Precision
from fractrain_fx.errors import ConfigError
from fractrain_fx.hardware.catalogue import find_machine
from fractrain_fx.hardware.machine import CODE_FORMATS, Choice, Machine
from fractrain_fx.numerics.sensitivity import MeasuredOp, Sensitivities
from fractrain_fx.passes import Op

__all__ = ["Price", "Unit", "price_in"]

_TOLD = 3  # ops that an error names

Unit = Literal["cp", "joules", "seconds"]


Price = Callable[[MeasuredOp, Precision], float]
"""The cost of an op at a precision."""


def price_in(unit: Unit, sensitivities: Sensitivities, machine: Machine | str | None, batch: int) -> Price:
    """The price of an op in a unit; for ``cp`` its share of ``cp_total``, in per cent.

    An op that is not rounded costs nothing on a machine that has no price for it; for a measured op the price raises
    :class:`ConfigError` then.
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
    step_price = cache(partial(_step_price, unit, chosen := find_machine(machine), batch))

    def price(op: MeasuredOp, precision: Precision) -> float:
        cost = step_price(op, precision)
        if cost is None and op.fixed is None:
            unpriced = [other for other in sensitivities.measured if step_price(other, precision) is None]
            raise ConfigError(_without_price(chosen, unpriced))
        return cost or 0.0

    return price


def _without_price(machine: Machine, ops: Sequence[MeasuredOp]) -> str:
    """Why a machine has no price for some ops."""
    names = ", ".join(f"{op.name!r} ({_why(op)})" for op in ops[:_TOLD])
    more = f" and {len(ops) - _TOLD} more" if len(ops) > _TOLD else ""
    return (
        f"machine {machine.name!r} has no price for {names}{more}: write another machine ('fractrain machines' lists "
        "them), or unit='cp'"
    )


def _why(op: MeasuredOp) -> str:
    if op.product is None:
        return "its sizes are not known"
    if op.format not in CODE_FORMATS:
        return f"format {op.format!r} has no integer codes"
    return "no part of it fits the machine's memory"


def _step_price(unit: Unit, machine: Machine, batch: int, op: MeasuredOp, precision: Precision) -> float | None:
    """The time or energy of a training step on a machine; ``None`` if it has no price for the op."""
    fw, eb, gc = op.macs
    work = Op(op.name, op.kind, op.module, fw, input_gradient=bool(eb), weight_gradient=bool(gc), product=op.product)
    choice = Choice(precision, None, op.format, least=op.least, by_product=op.by_product)
    step = machine.step([work], {op.name: (choice,)}, batch=batch)
    if op.name not in step.ops:
        return None
    if unit == "seconds":
        return step.seconds
    if step.joules is None:
        raise ConfigError(f"machine {machine.name!r} does not say what {op.name!r} takes in joules")
    return step.joules
