"""``allocate``: the widths of each op that harm the loss least under a budget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import yaml
from rich.console import Console, ConsoleOptions, RenderResult

from fractrain_fx.config import Pin
from fractrain_fx.config.precision import Precision
from fractrain_fx.durable import write_text
from fractrain_fx.errors import ConfigError
from fractrain_fx.hardware.machine import Machine
from fractrain_fx.numerics.allocation.price import Prices, Unit, fixed_precision, prices_in
from fractrain_fx.numerics.allocation.solve import Option, choose
from fractrain_fx.numerics.sensitivity import MeasuredOp, Sensitivities

__all__ = ["NOISE_PRICE", "Allocation", "allocate"]

NOISE_PRICE = 0.2
"""The default ``noise_price``: about what the loss of small networks falls by when the learning rate decays."""

_LEAST = Precision(3, 4)


@dataclass(frozen=True)
class Allocation:
    """The precision of each measured op.

    Attributes:
        precisions: by name of the op.
        modules: the module of each op.
        cost: what training costs, in ``unit``; for ``cp`` the ``cp_total`` in per cent.
        budget: what it may cost.
        unit: ``cp``, ``joules`` or ``seconds`` (of a training step).
        harm: the expected change of the loss.
    """

    precisions: Mapping[str, Precision]
    modules: Mapping[str, str]
    cost: float
    budget: float
    unit: Unit
    harm: float

    @property
    def pins(self) -> tuple[Pin, ...]:
        """A rule for each op, for ``FracConfig(method="static", pins=...)``."""
        # A name that is also the module of other ops matches these too, so that their own rules have to come later.
        modules = set(self.modules.values())
        first = sorted(self.precisions, key=lambda name: name not in modules)
        return tuple(Pin(_escaped(name), self.precisions[name]) for name in first)

    def to_yaml(self, path: str | Path) -> None:
        """Write settings for ``fractrain train --config``."""
        write_text(Path(path), yaml.safe_dump({"method": "static", "pins": [str(pin) for pin in self.pins]}, width=120))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from fractrain_fx.numerics.allocation.table import allocation_table

        yield from allocation_table(self)


def allocate(
    sensitivities: Sensitivities,
    budget: float | Precision | str,
    unit: Unit = "cp",
    *,
    machine: Machine | str | None = None,
    batch: int = 128,
    options: Iterable[Precision | str] | None = None,
    noise_price: float = NOISE_PRICE,
) -> Allocation:
    """The precision of each op that harms the loss least, under a budget for all; exact for these sensitivities.

    Args:
        sensitivities: of the model, by :func:`fractrain_fx.sensitivity`.
        budget: the most that training may cost: ``cp_total`` in per cent, or joules or seconds of a training step. A
            precision (``"FW-4/BW-6"``) stands for what it costs everywhere.
        unit: of the budget.
        machine: prices joules and seconds.
        batch: samples of the step that the machine prices.
        options: the precisions to choose from; by default all measured widths from FW-3/BW-4 on.
        noise_price: how much the noise of gradients counts beside the errors of the forward pass: the rise of the loss
            where it is as harmful as the batch's own noise.

    Raises:
        ConfigError: the budget is too small, a precision was not measured, or scipy is not installed.
    """
    if not noise_price >= 0:
        raise ConfigError(f"noise_price={noise_price} must be 0 or more")
    measured = sensitivities.measured
    if not measured:
        raise ConfigError("no op was measured, so there is nothing to allocate")
    prices = prices_in(unit, sensitivities, machine, batch)
    fixed = sum(prices.of(op, fixed_precision(op)) for op in sensitivities.ops if op.fixed is not None)
    limit = _limit(budget, measured, prices, fixed)
    open_to = {op.name: _options(sensitivities, op, options) for op in measured}
    groups = [
        [Option(prices.of(op, each), sensitivities.harm(op.name, each, noise_price)) for each in open_to[op.name]]
        for op in measured
    ]
    least = fixed + sum(min(option.cost for option in group) for group in groups)
    if least > limit:
        raise ConfigError(
            f"budget={budget} is below the {least:.4g} that the cheapest options cost (of which {fixed:.4g} is for ops "
            "that are not rounded): allow more, or give cheaper options"
        )
    chosen = choose(groups, limit - fixed)
    return Allocation(
        precisions={op.name: open_to[op.name][index] for op, index in zip(measured, chosen, strict=True)},
        modules={op.name: op.module for op in sensitivities.ops},
        cost=fixed + sum(group[index].cost for group, index in zip(groups, chosen, strict=True)),
        budget=limit,
        unit=unit,
        harm=sum(group[index].harm for group, index in zip(groups, chosen, strict=True)),
    )


def _limit(budget: float | Precision | str, measured: Sequence[MeasuredOp], prices: Prices, fixed: float) -> float:
    if isinstance(budget, str):
        budget = Precision.parse(budget)
    if isinstance(budget, Precision):
        # A little more than the sum, whose last digits depend on the order of its terms.
        return (fixed + sum(prices.of(op, budget) for op in measured)) * (1 + 1e-9)
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not budget > 0:
        raise ConfigError(f"budget={budget!r} must be a number above 0, or a precision such as 'FW-4/BW-6'")
    return float(budget)


def _options(sensitivities: Sensitivities, op: MeasuredOp, given: Iterable[Precision | str] | None) -> list[Precision]:
    if given is not None:
        return list(dict.fromkeys(Precision.parse(each) for each in given))
    widths = sensitivities.widths(op.name)
    every = [Precision(fw, bw) for fw, bw in product(widths, widths) if fw >= _LEAST.fw and bw >= _LEAST.bw]
    if not every:
        raise ConfigError(
            f"{op.name!r} was measured at {', '.join(map(str, widths))} bits, and options begin at {_LEAST}: write "
            "options=[...], or measure wider ones"
        )
    return every


def _escaped(name: str) -> str:
    """A name as a pattern that matches it literally."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
