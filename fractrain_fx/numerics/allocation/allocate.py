"""``allocate``: the widths of each op that harm the loss least under a budget, for a training or for each stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from typing import overload

from fractrain_fx.config.precision import Precision, PrecisionStages
from fractrain_fx.config.recipes import recipe_of, widths_of
from fractrain_fx.errors import ConfigError
from fractrain_fx.hardware.machine import Machine
from fractrain_fx.numerics.allocation.allocation import Allocation, StagedAllocation
from fractrain_fx.numerics.allocation.price import Price, Unit, price_in
from fractrain_fx.numerics.allocation.solve import Option, choose
from fractrain_fx.numerics.sensitivity import MeasuredOp, Sensitivities

__all__ = ["NOISE_PRICE", "allocate"]

NOISE_PRICE = 0.2
"""The default ``noise_price``: about what the loss of small networks falls by when the learning rate decays."""

_LEAST = Precision(3, 4)

Budget = float | Precision | str


@overload
def allocate(
    sensitivities: Sensitivities,
    budget: Budget,
    unit: Unit = "cp",
    *,
    stages: None = None,
    machine: Machine | str | None = None,
    batch: int = 128,
    options: Iterable[Precision | str] | None = None,
    noise_price: float = NOISE_PRICE,
) -> Allocation: ...
@overload
def allocate(
    sensitivities: Sensitivities,
    budget: Budget | Sequence[Budget] | PrecisionStages,
    unit: Unit = "cp",
    *,
    stages: int,
    machine: Machine | str | None = None,
    batch: int = 128,
    options: Iterable[Precision | str] | None = None,
    noise_price: float = NOISE_PRICE,
) -> StagedAllocation: ...
def allocate(
    sensitivities: Sensitivities,
    budget: Budget | Sequence[Budget] | PrecisionStages,
    unit: Unit = "cp",
    *,
    stages: int | None = None,
    machine: Machine | str | None = None,
    batch: int = 128,
    options: Iterable[Precision | str] | None = None,
    noise_price: float = NOISE_PRICE,
) -> Allocation | StagedAllocation:
    """The precision of each op that harms the loss least, under a budget for all; exact for these sensitivities.

    Args:
        sensitivities: of the model, by :func:`fractrain_fx.sensitivity`.
        budget: the most that training may cost: ``cp_total`` in per cent, or joules or seconds of a training step. A
            precision (``"FW-4/BW-6"``) stands for what it costs everywhere. With ``stages`` it is that of the last
            stage, to which the others rise in equal steps from the cheapest options; or one for each stage
            (``"FW(3,4,6,8)/BW(6,6,8,8)"``).
        unit: of the budget.
        stages: number of stages for ``method="pfq"``. The last one is the best choice under its budget; each one before
            it is the best choice whose widths are nowhere above the next stage's.
        machine: prices joules and seconds.
        batch: samples of the step that the machine prices.
        options: the precisions to choose from; by default all measured widths from FW-3/BW-4 on.
        noise_price: how much the noise of gradients counts beside the errors of the forward pass: the rise of the loss
            where it is as harmful as the batch's own noise.

    Raises:
        ConfigError: the budget is too small, falls from stage to stage, or does not fit their number; a precision was
            not measured; the machine has no price for an op; or scipy is not installed.
    """
    if not noise_price >= 0:
        raise ConfigError(f"noise_price={noise_price} must be 0 or more")
    if not sensitivities.measured:
        raise ConfigError("no op was measured, so there is nothing to allocate")
    price = price_in(unit, sensitivities, machine, batch)
    precisions = None if options is None else list(dict.fromkeys(Precision.parse(option) for option in options))
    problem = _Problem(sensitivities, price, unit, precisions, noise_price)
    budgets = _budgets(budget, stages)
    limits = [problem.limit(amount) for amount in budgets]
    if limits[0] < problem.least:
        raise ConfigError(
            f"budget={budgets[0]} is below the {problem.least:.4g} that the cheapest options cost (of which "
            f"{problem.fixed:.4g} is for ops that are not rounded): allow more, or give cheaper options"
        )
    if stages is None:
        return problem.solve(limits[0])
    if len(limits) == 1:
        room = limits[0] - problem.least
        limits = [problem.least + room * stage / stages for stage in range(1, stages)] + limits
    return _staged(problem, limits, budgets)


def _budgets(budget: Budget | Sequence[Budget] | PrecisionStages, stages: int | None) -> Sequence[Budget]:
    """The budget of each stage, or of the last one."""
    if stages is None:
        return [budget]  # type: ignore[list-item]  # refused by _Problem.limit if it is none
    if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1:
        raise ConfigError(f"stages={stages!r} must be a whole number from 1 on")
    if isinstance(budget, str) and "(" in budget:
        budget = PrecisionStages.parse(budget)
    if isinstance(budget, PrecisionStages):
        budget = budget.stages
    if isinstance(budget, str | float | int | Precision):
        return [budget]
    if not isinstance(budget, Sequence) or len(budget) != stages:
        raise ConfigError(f"budget={budget!r} must be that of the last stage, or {stages} of them, one a stage")
    return budget


def _staged(problem: _Problem, limits: Sequence[float], budgets: Sequence[Budget]) -> StagedAllocation:
    """The stages from the last to the first, because the last decides how good the trained model is."""
    for stage, (before, after) in enumerate(pairwise(limits), 1):
        if after < before:
            raise ConfigError(
                f"the budgets fall from stage {stage} ({before:.4g}) to stage {stage + 1} ({after:.4g}): widths only "
                "rise, so give budgets that do not fall"
            )
    best: list[Allocation] = []
    for limit in reversed(limits):
        best.append(problem.solve(limit, best[-1].precisions if best else None, stage=len(limits) - len(best)))
    return StagedAllocation(tuple(reversed(best)), PrecisionStages(problem.names(limits, budgets)))


@dataclass(frozen=True)
class _Problem:
    """A choice of one precision for each op."""

    sensitivities: Sensitivities
    price: Price
    unit: Unit
    given: list[Precision] | None
    noise_price: float

    @cached_property
    def fixed(self) -> float:
        """What ops cost that are not rounded."""
        ops = self.sensitivities.ops
        return sum(self.price(op, at) for op in ops if (at := op.fixed_precision) is not None)

    @cached_property
    def options(self) -> dict[str, list[Precision]]:
        """The precisions to choose from, by op."""
        return {op.name: self.given or _usual(self.sensitivities, op) for op in self.sensitivities.measured}

    @cached_property
    def least(self) -> float:
        """The cost of the cheapest options."""
        groups = [[self.price(op, bits) for bits in self.options[op.name]] for op in self.sensitivities.measured]
        return self.fixed + sum(map(min, groups))

    def everywhere(self, precision: Precision) -> float:
        """The cost of one precision for all ops."""
        return self.fixed + sum(self.price(op, precision) for op in self.sensitivities.measured)

    def limit(self, budget: object) -> float:
        """A budget as a number."""
        if isinstance(budget, str):
            budget = Precision.parse(budget)
        if isinstance(budget, Precision):
            # A little more than the sum, whose last digits depend on the order of its terms.
            return self.everywhere(budget) * (1 + 1e-9)
        if isinstance(budget, bool) or not isinstance(budget, int | float) or not budget > 0:
            raise ConfigError(f"budget={budget!r} must be a number above 0, or a precision such as 'FW-4/BW-6'")
        return float(budget)

    def solve(self, limit: float, below: Mapping[str, Precision] | None = None, stage: int = 0) -> Allocation:
        """The best choice under a limit whose widths are nowhere above those of ``below``.

        Only among options of the user can all cost more, which is refused.
        """
        ops = self.sensitivities.measured
        open_to = {
            name: [bits for bits in options if below is None or _at_most(bits, below[name])]
            for name, options in self.options.items()
        }
        groups = [
            [
                Option(self.price(op, bits), self.sensitivities.harm(op.name, bits, self.noise_price))
                for bits in open_to[op.name]
            ]
            for op in ops
        ]
        least = self.fixed + sum(min(option.cost for option in group) for group in groups)
        if below is not None and least > limit:
            raise ConfigError(
                f"stage {stage} costs at least {least:.4g} with widths nowhere above those of stage {stage + 1}, and "
                f"its budget is {limit:.4g}: allow more, or add options that have no more bits than another in both"
            )
        chosen = choose(groups, limit - self.fixed)
        return Allocation(
            precisions={op.name: open_to[op.name][index] for op, index in zip(ops, chosen, strict=True)},
            sensitivities=self.sensitivities,
            cost=self.fixed + sum(group[index].cost for group, index in zip(groups, chosen, strict=True)),
            budget=limit,
            unit=self.unit,
            harm=sum(group[index].harm for group, index in zip(groups, chosen, strict=True)),
        )

    def names(self, limits: Sequence[float], budgets: Sequence[Budget]) -> tuple[Precision, ...]:
        """For each limit the uniform precision of the measured format whose cost is nearest, each once."""
        recipe = self.sensitivities.settings.get("recipe")
        exact = [Precision.parse(budget) for budget in budgets if isinstance(budget, str | Precision)]
        known = dict.fromkeys(bits for options in self.options.values() for bits in options)
        usual = [bits for bits in known if bits.fw <= bits.bw]
        usual = usual if len(usual) >= len(limits) else list(known)
        fitting = [bits for bits in [*exact, *usual] if recipe is None or widths_of(recipe_of(recipe), bits) is None]
        cost = {bits: self.everywhere(bits) for bits in fitting}
        names: list[Precision] = []
        for stage, limit in enumerate(limits, 1):
            free = [bits for bits in cost if bits not in names]
            if not free:
                raise ConfigError(f"{len(cost)} precisions cannot name {len(limits)} stages: give more options")
            exactly = exact[stage - 1] if len(exact) == len(limits) and exact[stage - 1] in free else None
            names.append(exactly or min(free, key=lambda bits: abs(cost[bits] - limit)))
        return tuple(names)


def _at_most(precision: Precision, other: Precision) -> bool:
    return precision.fw <= other.fw and precision.bw <= other.bw


def _usual(sensitivities: Sensitivities, op: MeasuredOp) -> list[Precision]:
    """All measured widths of an op, from those on that train."""
    widths = sensitivities.widths(op.name)
    every = [Precision(fw, bw) for fw, bw in product(widths, widths) if fw >= _LEAST.fw and bw >= _LEAST.bw]
    if not every:
        raise ConfigError(
            f"{op.name!r} was measured at {', '.join(map(str, widths))} bits, and options begin at {_LEAST}: write "
            "options=[...], or measure wider ones"
        )
    return every
