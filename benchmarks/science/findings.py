"""The opening of a task in docs/measured/results.md: a short table and sentences, made of the runs' numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from benchmarks.page import markdown_table
from benchmarks.science.cells import cost_share, mean_and_range, signed
from benchmarks.science.records import Group, difference, gap, seeds_and_epochs, static_at, static_of

__all__ = ["findings", "main_settings", "quality"]


def findings(groups: Sequence[Group]) -> str:
    """A table of each method in its main setting, and sentences; empty without static training to compare with."""
    static = static_of(groups)
    if not static:
        return ""
    sentences = [*_at_equal_cost(groups, static), *_by_input(groups)]
    return "\n\n".join(filter(None, (_at_equal_epochs(groups, static), "\n".join(f"- {each}" for each in sentences))))


def _at_equal_epochs(groups: Sequence[Group], static: Sequence[Group]) -> str:
    """Static training, and of each method the length with the most seeds and those that are longer."""
    bases = {base.epochs: base for base in static}
    metric = static[0].records[0]["metric"]
    chosen = []
    for method, setting in main_settings(groups, static):
        mine = [group for group in _of(groups, method, setting) if group.epochs in bases]
        surest = max(mine, key=seeds_and_epochs, default=None)
        chosen += [group for group in mine if surest and (group is surest or group.epochs > surest.epochs)]
    compared = [base for base in static if any(group.epochs == base.epochs for group in chosen)]
    rows = []
    for group in (*compared, *chosen):
        base = bases[group.epochs]
        same = None if group is base else static_at(group.mean("total_macs"), static)
        rows.append(
            (
                *(group.method, group.setting, str(group.epochs), str(len(group.records))),
                mean_and_range(group.values("value")),
                signed(difference(group, base), metric),
                cost_share(group, base),
                "" if same is None else signed(gap(group, same), metric),
            )
        )
    head = ("method", "setting", "epochs", "seeds", f"test {metric}", "to static", "its cost", "to static of its cost")
    return markdown_table(head, rows, text_columns=2) if chosen else ""


def _at_equal_cost(groups: Sequence[Group], static: Sequence[Group]) -> Iterator[str]:
    """A sentence for each method that was trained over several lengths."""
    for method, setting in main_settings(groups, static):
        mine = _of(groups, method, setting)
        found = [(group, static_at(group.mean("total_macs"), static)) for group in mine]
        distances = [
            f"{_beside(group, same)} ({group.epochs} epochs)"
            for group, same in sorted(found, key=lambda pair: pair[0].epochs)
            if same is not None
        ]
        if len(distances) > 1:
            beside = "beside static FW-8/BW-8 training over fewer epochs, which costs as much"
            yield f"**{method}** ({setting}) {beside}: {', '.join(distances)}."


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
        ends = f"{min(gains):+.{digits}f}" + (f" to {max(gains):+.{digits}f}" if len(gains) > 1 else "")
        runs = "one run" if len(gains) == 1 else f"{len(gains)} runs"
        yield f"Choosing by input is worth {ends} {unit} beside the same trained model {words} ({runs})."


def main_settings(groups: Sequence[Group], static: Sequence[Group]) -> list[tuple[str, str]]:
    """For each method but static, the setting with the most seeds.

    Of several: the best, and the best of those that cost less than static training.
    """
    costs = {base.epochs: base.mean("total_macs") for base in static}

    def rank(group: Group) -> tuple[int, int, float]:
        return *seeds_and_epochs(group), quality(group)

    found = []
    for method in dict.fromkeys(group.method for group in groups if group.method != "static"):
        mine = [group for group in groups if group.method == method]
        best = max(mine, key=rank)
        cheaper = [group for group in mine if group.mean("total_macs") < costs.get(group.epochs, 0)]
        rivals = [group for group in cheaper if seeds_and_epochs(group) == seeds_and_epochs(best)]
        found += [best, *([max(rivals, key=rank)] if rivals else [])]
    return list(dict.fromkeys((group.method, group.setting) for group in found))


def _of(groups: Sequence[Group], method: str, setting: str) -> list[Group]:
    return [group for group in groups if (group.method, group.setting) == (method, setting)]


def quality(group: Group) -> float:
    """Higher is better."""
    return -gap(group, 1.0) if group.records[0]["metric"] == "perplexity" else gap(group, 0.0)


def _beside(group: Group, other: float) -> str:
    """How far a group is from another value, in words."""
    far = gap(group, other)
    if group.records[0]["metric"] == "perplexity":
        return f"{abs(far):.3f} nats {'worse' if far > 0 else 'better'} than"
    return f"{abs(far):.2f} points {'above' if far > 0 else 'below'}"
