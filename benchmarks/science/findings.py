"""Each task in docs/measured/results.md as a short table, and what choosing by input is worth in all of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from benchmarks.page import markdown_table
from benchmarks.science.cells import cost_share, signed
from benchmarks.science.records import Group, difference, gap, of_setting, seeds_and_epochs, static_at, static_of

__all__ = ["by_input", "findings", "main_settings", "quality"]

_BY_INPUT = """## Is choosing by input worth anything?

The trained model beside itself with other choices: each sample with the options of another one, and all samples with
each block's most frequent option, at no lower cost. Means over all runs with gates; a positive number says that the
model's own choices are better."""


def findings(groups: Sequence[Group]) -> str:
    """A table of each method in its main setting; empty without static training to compare with."""
    static = static_of(groups)
    return _at_equal_epochs(groups, static) if static else ""


def by_input(groups: Sequence[Group]) -> str:
    """The worth of choosing by input: a row for each task with tested runs; empty if no run was tested."""
    tested: dict[str, list[tuple[str, Mapping[str, float]]]] = {}
    for group in groups:
        for record in group.records:
            if record.get("fixed"):
                tested.setdefault(group.task, []).append((record["metric"], record["fixed"]))
    rows = [
        (f"[{task}](#{task})", str(len(runs)), _worth(runs, "shuffled_value"), _worth(runs, "fixed_value"))
        for task, runs in tested.items()
    ]
    head = ("task", "runs", "beside options of another sample", "beside the most frequent option")
    return f"{_BY_INPUT}\n\n{markdown_table(head, rows)}" if rows else ""


def _worth(runs: Sequence[tuple[str, Mapping[str, float]]], other: str) -> str:
    """The mean gain of the trained model beside itself with other choices."""
    if runs[0][0] == "perplexity":
        return f"{statistics.mean(math.log(fixed[other] / fixed['value']) for _, fixed in runs):+.3f} nats"
    return f"{statistics.mean(fixed['value'] - fixed[other] for _, fixed in runs):+.2f} points"


def _at_equal_epochs(groups: Sequence[Group], static: Sequence[Group]) -> str:
    """Static training, and of each method the length with the most seeds and those that are longer."""
    bases = {base.epochs: base for base in static}
    metric = static[0].metric
    chosen = []
    for method, setting in main_settings(groups, static):
        mine = [group for group in of_setting(groups, method, setting) if group.epochs in bases]
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
                f"{group.mean('value'):.2f}",
                signed(difference(group, base), metric),
                cost_share(group, base),
                "" if same is None else signed(gap(group, same), metric),
            )
        )
    head = ("method", "setting", "epochs", "seeds", f"test {metric}", "to static", "its cost", "to static of its cost")
    return markdown_table(head, rows, text_columns=2) if chosen else ""


def main_settings(groups: Sequence[Group], static: Sequence[Group]) -> list[tuple[str, str]]:
    """For each method but static, the setting with the most seeds.

    Of several: the best, and the best of those that cost less than static training.
    """
    costs = {base.epochs: base.mean("total_macs") for base in static}

    def rank(group: Group) -> tuple[int, int, float]:
        return *seeds_and_epochs(group), quality(group)

    chosen = []
    for method in dict.fromkeys(group.method for group in groups if group.method != "static"):
        mine = [group for group in groups if group.method == method]
        best = max(mine, key=rank)
        cheaper = [group for group in mine if group.mean("total_macs") < costs.get(group.epochs, 0)]
        rivals = [group for group in cheaper if seeds_and_epochs(group) == seeds_and_epochs(best)]
        chosen += [best, *([max(rivals, key=rank)] if rivals else [])]
    return list(dict.fromkeys((group.method, group.setting) for group in chosen))


def quality(group: Group) -> float:
    """Higher is better."""
    return -gap(group, 1.0) if group.metric == "perplexity" else gap(group, 0.0)
