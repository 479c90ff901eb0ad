"""The exact choice of one option for each op under a budget (a multiple-choice knapsack)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fractrain_fx.errors import RunError, require_packages

__all__ = ["Option", "choose"]


class Option(NamedTuple):
    """What an option of an op costs and harms."""

    cost: float
    harm: float


def choose(groups: Sequence[Sequence[Option]], budget: float) -> list[int]:
    """The option of each group that together harm least, at a cost of at most ``budget``.

    Args:
        groups: the options of each op.
        budget: at least what the cheapest options cost.

    Raises:
        MissingPackageError: scipy is not installed.
        RunError: the solver gave up.
    """
    require_packages("allocation", "allocate")
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array, vstack

    kept = [_undominated(group) for group in groups]
    sizes = [len(each) for each in kept]
    options = [group[index] for group, indices in zip(groups, kept, strict=True) for index in indices]
    ends = np.cumsum([0, *sizes])
    one_each = csr_array((np.ones(len(options)), np.arange(len(options)), ends), shape=(len(groups), len(options)))
    costs = np.array([option.cost for option in options]) / budget
    harms = np.array([option.harm for option in options])
    found = milp(
        harms / max(float(harms.max()), 1e-300),
        integrality=np.ones(len(options)),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(
            vstack([one_each, csr_array(costs[None, :])]),
            np.concatenate([np.ones(len(groups)), [0.0]]),
            np.ones(len(groups) + 1),
        ),
        options={"mip_rel_gap": 1e-6},
    )
    if found.x is None:
        raise RunError(f"no allocation was found: {found.message}")
    return [
        indices[int(np.argmax(found.x[start:end]))]
        for indices, start, end in zip(kept, ends[:-1], ends[1:], strict=True)
    ]


def _undominated(group: Sequence[Option]) -> list[int]:
    """The options of a group that no other beats in both cost and harm, in the order of their cost."""
    order = sorted(range(len(group)), key=lambda index: (group[index].cost, group[index].harm))
    best: list[int] = []
    for index in order:
        if not best or group[index].harm < group[best[-1]].harm:
            best.append(index)
    return best
