"""The exact choice of one option for each op under a budget (a multiple-choice knapsack)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fractrain_fx.errors import RunError, require_packages

__all__ = ["Option", "choose"]

_FINER = 1e3  # harms and costs of size 1 are multiplied by it, beside the solver's tolerance of 1e-6


class Option(NamedTuple):
    """What an option of an op costs and harms."""

    cost: float
    harm: float


def choose(groups: Sequence[Sequence[Option]], budget: float) -> list[int]:
    """The option of each group (op) that together harm least, at a cost of at most ``budget``.

    The solver's tolerances are absolute, so an option of very large harm would hide the differences between the others.
    Such options are left out, and the rest is solved again at its own scale. The cheapest options must fit the budget.
    """
    rest = [_undominated(group) for group in groups]
    while True:
        largest = max(option.harm for options in rest for option in options.values())
        chosen = _solved(rest, budget, largest)
        total = sum(options[index].harm for options, index in zip(rest, chosen, strict=True))
        if largest <= 2 * total or not total:
            return chosen
        # No option that harms more than all chosen ones together is part of the best choice.
        rest = [{index: option for index, option in options.items() if option.harm <= total} for options in rest]


def _solved(groups: Sequence[Mapping[int, Option]], budget: float, largest: float) -> list[int]:
    """The choice of one option of each group, where ``largest`` is the largest harm."""
    require_packages("allocation", "allocate")
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array, vstack

    options = [option for group in groups for option in group.values()]
    ends = np.cumsum([0, *map(len, groups)])
    one_each = csr_array((np.ones(len(options)), np.arange(len(options)), ends), shape=(len(groups), len(options)))
    costs = _FINER / budget * np.array([option.cost for option in options])
    harms = _FINER / max(largest, 1e-300) * np.array([option.harm for option in options])
    result = milp(
        harms,
        integrality=np.ones(len(options)),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(
            vstack([one_each, csr_array(costs[None, :])]),
            np.concatenate([np.ones(len(groups)), [0.0]]),
            np.concatenate([np.ones(len(groups)), [_FINER]]),
        ),
        options={"mip_rel_gap": 1e-9},
    )
    if result.x is None:
        raise RunError(f"no allocation was found: {result.message}")
    return [
        list(group)[int(np.argmax(result.x[start:end]))]
        for group, start, end in zip(groups, ends[:-1], ends[1:], strict=True)
    ]


def _undominated(group: Sequence[Option]) -> dict[int, Option]:
    """The options that no other beats in both cost and harm, in the order of their cost, with harms from 0 on."""
    order = sorted(range(len(group)), key=lambda index: (group[index].cost, group[index].harm))
    best: list[int] = []
    for index in order:
        if not best or group[index].harm < group[best[-1]].harm:
            best.append(index)
    least = group[best[-1]].harm
    return {index: Option(group[index].cost, group[index].harm - least) for index in best}
