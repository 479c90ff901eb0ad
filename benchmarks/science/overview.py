"""The opening table of docs/measured/results.md: every task in a row, each method beside static training."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.page import markdown_table
from benchmarks.science.cells import cost_share, signed
from benchmarks.science.findings import main_settings
from benchmarks.science.named import TASKS
from benchmarks.science.records import Group, difference, seeds_and_epochs, static_of

__all__ = ["overview"]

_METHODS = ("float", "pfq", "dfq", "fractrain")
_WORDS = (
    "How far each method ends from static FW-8/BW-8 training over as many epochs, and its cost beside that of static "
    "training. More points are better, and fewer nats. Settings and seeds stand in the tables of each task."
)


def overview(groups: Sequence[Group]) -> str:
    """A row for each task that has static training and another of these methods; empty without any."""
    rows = [row for task in TASKS if (row := _row(task, groups))]
    return f"{_WORDS}\n\n{markdown_table(('task', 'epochs', 'static', *_METHODS), rows)}" if rows else ""


def _row(task: str, groups: Sequence[Group]) -> tuple[str, ...] | None:
    mine = [group for group in groups if group.task == task]
    base = max(static_of(mine), key=seeds_and_epochs, default=None)
    if base is None:
        return None
    others = dict.fromkeys(_METHODS, "")
    # The last setting of a method is the one that costs less than static training, where there is one.
    for method, setting in main_settings(mine, [base]):
        same = (method, setting, base.epochs)
        group = next((each for each in mine if (each.method, each.setting, each.epochs) == same), None)
        if group is not None and method in others:
            others[method] = _beside(group, base)
    if not any(others.values()):
        return None
    value, metric = base.mean("value"), base.records[0]["metric"]
    shown = f"{value:.2f} %" if metric == "accuracy" else f"{metric} {value:.2f}"
    return (f"[{task}](#{task})", str(base.epochs), shown, *others.values())


def _beside(group: Group, base: Group) -> str:
    metric = base.records[0]["metric"]
    unit = "nats" if metric == "perplexity" else "points"
    return f"{signed(difference(group, base), metric)} {unit} for {cost_share(group, base)}"
