"""The opening of docs/measured/results.md: methods beside static training, in sentences and in a table of all tasks."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.page import markdown_table
from benchmarks.science.cells import cost_share, distance_words, signed
from benchmarks.science.findings import main_settings, quality
from benchmarks.science.named import TASKS
from benchmarks.science.records import Group, difference, gap, of_setting, seeds_and_epochs, static_of

__all__ = ["beside_static", "overview"]

_METHODS = ("pfq", "fractrain")
_NEAR = {"accuracy": 0.25, "perplexity": 0.02}  # points; nats
_WORDS = """## All tasks

A method's end beside that of static FW-8/BW-8 over as many epochs, and its cost as a share of static's. Fewer nats are
better."""


def beside_static(groups: Sequence[Group], task: str, epochs: int, title: str) -> str:
    """A sentence for each method that costs less than static training, at the length of a picture.

    The first one is for the cheapest static setting that ends as well, if there is one.
    """
    mine = [group for group in groups if (group.task, group.epochs) == (task, epochs)]
    base = max(static_of(mine), key=seeds_and_epochs, default=None)
    if base is None:
        return ""
    lines = [f"{title}, {epochs} epochs, beside static FW-8/BW-8 training:"]
    if (level := _cheapest_as_good(mine, base)) is not None:
        lines.append(_sentence(level, base))
    # The last setting of a method is the one that costs less than static training, where there is one.
    for method, setting in dict(main_settings(mine, [base])).items():
        group = of_setting(mine, method, setting)[0]
        if group.mean("total_macs") < base.mean("total_macs"):
            lines.append(_sentence(group, base))
    return f"{lines[0]}\n\n" + "\n".join(lines[1:]) if len(lines) > 1 else ""


def _cheapest_as_good(groups: Sequence[Group], base: Group) -> Group | None:
    """The cheapest other static setting of as many seeds that ends nearly as well."""
    mine = [group for group in groups if group.method == "static" and len(group.records) >= len(base.records)]
    level = [group for group in mine if group is not base and quality(base) - quality(group) <= _NEAR[base.metric]]
    return min(level, key=lambda group: group.mean("total_macs"), default=None)


def _sentence(group: Group, base: Group) -> str:
    seeds = "one seed" if len(group.records) == 1 else f"{len(group.records)} seeds"
    words = distance_words(gap(group, base.mean("value")), group.metric)
    named = f"**{group.method}**" + (f" (`{group.setting}`)" if group.setting != "default" else "")
    return f"- {named} ends {words} for {cost_share(group, base)} of its cost ({seeds})."


def overview(groups: Sequence[Group]) -> str:
    """A row for each task that has static training and another of these methods; empty without any."""
    rows = [row for task in TASKS if (row := _row(task, groups))]
    head = ["task", "epochs", "static"]
    for method in _METHODS:
        head += [method, "its cost"]
    return f"{_WORDS}\n\n{markdown_table(head, rows)}" if rows else ""


def _row(task: str, groups: Sequence[Group]) -> tuple[str, ...] | None:
    mine = [group for group in groups if group.task == task]
    base = max(static_of(mine), key=seeds_and_epochs, default=None)
    if base is None:
        return None
    others = dict.fromkeys(_METHODS, ("", ""))
    # The last setting of a method is the one that costs less than static training, where there is one.
    for method, setting in main_settings(mine, [base]):
        same = [group for group in of_setting(mine, method, setting) if group.epochs == base.epochs]
        if same and method in others:
            others[method] = _beside(same[0], base)
    if not any(distance for distance, _ in others.values()):
        return None
    value, metric = base.mean("value"), base.metric
    shown = f"{value:.2f} %" if metric == "accuracy" else f"{metric} {value:.2f}"
    return (f"[{task}](#{task})", str(base.epochs), shown, *(cell for pair in others.values() for cell in pair))


def _beside(group: Group, base: Group) -> tuple[str, str]:
    metric = base.metric
    unit = "nats" if metric == "perplexity" else "points"
    return f"{signed(difference(group, base), metric)} {unit}", cost_share(group, base)
