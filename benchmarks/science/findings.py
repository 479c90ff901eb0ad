"""The first sentences of docs/results.md: what a task's runs say, good and bad, computed from their numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from benchmarks.science.records import Group, gap, static_at, static_of

__all__ = ["findings", "main_settings"]


def findings(groups: Sequence[Group]) -> str:
    """A list of sentences about the runs of one task; empty without static training to compare with."""
    static = static_of(groups)
    if not static:
        return ""
    sentences = [*_at_equal_epochs(groups, static), *_at_equal_cost(groups, static), *_by_input(groups)]
    return "\n".join(f"- {sentence}" for sentence in sentences)


def _at_equal_epochs(groups: Sequence[Group], static: Sequence[Group]) -> Iterator[str]:
    """A sentence for the length with the most seeds, and one for a longer run if there is one."""
    bases = {base.epochs: base for base in static}
    for method, setting in main_settings(groups, static):
        mine = [group for group in _of(groups, method, setting) if group.epochs in bases]
        surest = max(mine, key=_seeds_and_epochs, default=None)
        for group in mine:
            if surest is None or (group is not surest and group.epochs <= surest.epochs):
                continue
            base = bases[group.epochs]
            share = 100 * group.mean("total_macs") / base.mean("total_macs")
            distance = _beside(group, base.mean("value"))
            yield (
                f"**{method}** ({setting}) after {group.epochs} epochs: {_shown(group)}, {distance} static FW-8/BW-8, "
                f"at {share:.0f} % of its cost ({_seeds(group)}; static: {_seeds(base)})."
            )


def _at_equal_cost(groups: Sequence[Group], static: Sequence[Group]) -> Iterator[str]:
    for method, setting in main_settings(groups, static):
        mine = _of(groups, method, setting)
        found = [(group, static_at(group.mean("total_macs"), static)) for group in mine]
        distances = [
            f"{_beside(group, same)} ({group.mean('total_macs'):.1e} MACs)"
            for group, same in sorted(found, key=lambda pair: pair[0].epochs)
            if same is not None
        ]
        if distances:
            same_cost = f"**{method}** ({setting}) beside static training as a whole of the same cost"
            yield f"{same_cost}: {', '.join(distances)}."


def _by_input(groups: Sequence[Group]) -> Iterator[str]:
    """What choosing by input is worth, over all runs that were tested."""
    tested = [(group, record["fixed"]) for group in groups for record in group.records if record.get("fixed")]
    if not tested:
        return
    perplexity = tested[0][0].records[0]["metric"] == "perplexity"
    for other, words in (
        ("shuffled_value", "with the options of another sample"),
        ("fixed_value", "with each block's most frequent option for all samples (at no lower cost)"),
    ):
        gains = [
            math.log(fixed[other] / fixed["value"]) if perplexity else fixed["value"] - fixed[other]
            for _, fixed in tested
        ]
        unit = "nats" if perplexity else "points"
        digits = 3 if perplexity else 2
        yield (
            f"Choosing by input is worth {min(gains):+.{digits}f} to {max(gains):+.{digits}f} {unit} beside the same "
            f"trained model {words} ({len(gains)} runs)."
        )


def main_settings(groups: Sequence[Group], static: Sequence[Group]) -> list[tuple[str, str]]:
    """For each method but static, the setting with the most seeds; of several, the best that costs less than static."""
    costs = {base.epochs: base.mean("total_macs") for base in static}

    def rank(group: Group) -> tuple[int, int, bool, float]:
        return (
            *_seeds_and_epochs(group),
            group.mean("total_macs") < costs.get(group.epochs, math.inf),
            _quality(group),
        )

    methods = dict.fromkeys(group.method for group in groups if group.method != "static")
    found = [max((group for group in groups if group.method == method), key=rank) for method in methods]
    return [(group.method, group.setting) for group in found]


def _of(groups: Sequence[Group], method: str, setting: str) -> list[Group]:
    return [group for group in groups if (group.method, group.setting) == (method, setting)]


def _seeds_and_epochs(group: Group) -> tuple[int, int]:
    return len(group.records), group.epochs


def _quality(group: Group) -> float:
    """Higher is better."""
    return -gap(group, 1.0) if group.records[0]["metric"] == "perplexity" else gap(group, 0.0)


def _beside(group: Group, other: float) -> str:
    """How far a group is from another value, in words."""
    far = gap(group, other)
    if group.records[0]["metric"] == "perplexity":
        return f"{abs(far):.3f} nats {'worse' if far > 0 else 'better'} than"
    return f"{abs(far):.2f} points {'above' if far > 0 else 'below'}"


def _shown(group: Group) -> str:
    value = group.mean("value")
    return f"perplexity {value:.2f}" if group.records[0]["metric"] == "perplexity" else f"{value:.2f} %"


def _seeds(group: Group) -> str:
    count = len(group.records)
    return f"{count} seeds" if count > 1 else "1 seed"
