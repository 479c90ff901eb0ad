"""The first sentences of docs/results.md: what a task's runs say, good and bad, computed from their numbers."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

from benchmarks.science.records import Group, gap, static_at, static_of

__all__ = ["findings"]


def findings(groups: Sequence[Group]) -> str:
    """A list of sentences about the runs of one task; empty without static training to compare with."""
    static = static_of(groups)
    if not static:
        return ""
    sentences = [*_at_equal_epochs(groups, static), *_at_equal_cost(groups, static), *_by_input(groups)]
    return "\n".join(f"- {sentence}" for sentence in sentences)


def _at_equal_epochs(groups: Sequence[Group], static: Sequence[Group]) -> Iterator[str]:
    for method, setting in _main_settings(groups):
        mine = {group.epochs: group for group in groups if (group.method, group.setting) == (method, setting)}
        both = [(mine[base.epochs], base) for base in static if base.epochs in mine]
        if not both:
            continue
        group, base = max(both, key=lambda pair: pair[0].epochs)
        share = 100 * _mean(group, "total_macs") / _mean(base, "total_macs")
        distance = _beside(group, _mean(base, "value"))
        yield (
            f"**{method}** ({setting}) after {group.epochs} epochs: {_shown(group)}, {distance} static FW-8/BW-8, "
            f"at {share:.0f} % of its cost ({_seeds(group)}; static: {_seeds(base)})."
        )


def _at_equal_cost(groups: Sequence[Group], static: Sequence[Group]) -> Iterator[str]:
    for method, setting in _main_settings(groups):
        mine = [group for group in groups if (group.method, group.setting) == (method, setting)]
        found = [(group, static_at(_mean(group, "total_macs"), static)) for group in mine]
        distances = [
            f"{_beside(group, same)} ({_mean(group, 'total_macs'):.1e} MACs)"
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


def _main_settings(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """For each method but static, its setting with the most lengths and seeds; of several, the first on the page."""
    runs: dict[str, Counter[str]] = {}
    for group in groups:
        runs.setdefault(group.method, Counter())[group.setting] += len(group.records)
    return [(method, counts.most_common(1)[0][0]) for method, counts in runs.items() if method != "static"]


def _beside(group: Group, other: float) -> str:
    """How far a group is from another value, in words."""
    far = gap(group, other)
    if group.records[0]["metric"] == "perplexity":
        return f"{abs(far):.3f} nats {'worse' if far > 0 else 'better'} than"
    return f"{abs(far):.2f} points {'above' if far > 0 else 'below'}"


def _shown(group: Group) -> str:
    value = _mean(group, "value")
    return f"perplexity {value:.2f}" if group.records[0]["metric"] == "perplexity" else f"{value:.2f} %"


def _seeds(group: Group) -> str:
    count = len(group.records)
    return f"{count} seeds" if count > 1 else "1 seed"


def _mean(group: Group, name: str) -> float:
    return statistics.mean(group.values(name))
