"""What each op costs at each precision, in the unit of a budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from fractrain_fx.config.precision import FULL, Precision
from fractrain_fx.errors import ConfigError
from fractrain_fx.hardware.catalogue import find_machine
from fractrain_fx.hardware.machine import Choice, Machine
from fractrain_fx.numerics.sensitivity import MeasuredOp, Sensitivities
from fractrain_fx.passes import Op

__all__ = ["Prices", "Unit", "prices_in"]

Unit = Literal["cp", "joules", "seconds"]


class Prices(Protocol):
    """Prices of ops."""

    def of(self, op: MeasuredOp, precision: Precision) -> float:
        """The cost of an op at a precision."""
        ...


def prices_in(unit: Unit, sensitivities: Sensitivities, machine: Machine | str | None, batch: int) -> Prices:
    """The prices in a unit.

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
        return _Shares(sensitivities)
    if machine is None:
        raise ConfigError(f"unit={unit!r} needs a machine, such as machine='h200' ('fractrain machines' lists them)")
    return _Step(unit, find_machine(machine), batch)


class _Shares:
    """The share of ``cp_total``, in per cent."""

    def __init__(self, sensitivities: Sensitivities) -> None:
        self._total = sum(sum(op.macs) for op in sensitivities.ops)

    def of(self, op: MeasuredOp, precision: Precision) -> float:
        return 100 * sum(op.cost.spent(precision)) / self._total


class _Step:
    """The time or energy of a training step on a machine."""

    def __init__(self, unit: Unit, machine: Machine, batch: int) -> None:
        self._unit, self._machine, self._batch = unit, machine, batch
        self._known: dict[tuple[str, Precision], float] = {}

    def of(self, op: MeasuredOp, precision: Precision) -> float:
        key = op.name, precision
        if key not in self._known:
            self._known[key] = self._price(op, precision)
        return self._known[key]

    def _price(self, op: MeasuredOp, precision: Precision) -> float:
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
        choices: Mapping[str, list[Choice]] = {
            op.name: [Choice(precision, None, op.format, least=op.least, by_product=op.by_product)]
        }
        step = self._machine.step([work], choices, batch=self._batch)
        if op.name not in step.ops:
            return 0.0  # what the machine has no price for costs nothing at any precision
        if self._unit == "seconds":
            return step.seconds
        if step.joules is None:
            raise ConfigError(f"machine {self._machine.name!r} does not say what {op.name!r} takes in joules")
        return step.joules


def fixed_precision(op: MeasuredOp) -> Precision:
    """The precision of an op that is not measured."""
    return FULL if op.fixed is None else Precision(op.fixed, op.fixed)
