"""Numbers as the cells of a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.science.records import Group

__all__ = ["cost_share", "distance_words", "mean_and_range", "signed"]


def mean_and_range(values: Sequence[float], digits: int = 2) -> str:
    """The mean, with the lowest and highest in brackets; empty without values."""
    if not values:
        return ""
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def cost_share(group: Group, base: Group) -> str:
    """The cost of a group's whole training, in per cent of that of another."""
    return f"{100 * group.mean('total_macs') / base.mean('total_macs'):.0f} %"


def signed(value: float | None, metric: str) -> str:
    """A difference in nats for perplexities and in points for accuracies; empty for ``None``."""
    return "" if value is None else f"{value:+.{3 if metric == 'perplexity' else 2}f}"


def distance_words(value: float, metric: str) -> str:
    """A difference in words: nats for perplexities, where less is better, and points for accuracies."""
    if metric == "perplexity":
        return f"{abs(value):.3f} nats {'worse' if value > 0 else 'better'}"
    return f"{abs(value):.2f} points {'higher' if value >= 0 else 'lower'}"
