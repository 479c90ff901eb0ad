"""What the runs show about raising MXFP4 to MXFP8: the automatic raise beside switches by hand."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.science.records import Group

__all__ = ["verdict"]

_AUTO = "mxfp4-auto-mxfp8"
# How far from MXFP8 throughout still counts as reaching it: nats for perplexities, points for accuracies.
_NEAR = {"perplexity": 0.01, "accuracy": 0.5}


@dataclass(frozen=True)
class _Outcome:
    """One method beside MXFP8 throughout.

    Attributes:
        losses: how much worse it ended, seed by seed: nats or points.
        share: its cost, as a share of MXFP8's.
    """

    method: str
    metric: str
    losses: tuple[float, ...]
    share: float

    @property
    def reaches(self) -> bool:
        return statistics.mean(self.losses) <= _NEAR[self.metric]

    def __str__(self) -> str:
        sign, digits, unit = (1, 3, "nats") if self.metric == "perplexity" else (-1, 2, "points")
        shown = sorted(sign * loss for loss in self.losses)
        words = f"{statistics.mean(shown):+.{digits}f} {unit}"
        if len(shown) > 1:
            words += f" (by seed {shown[0]:+.{digits}f} to {shown[-1]:+.{digits}f})"
        return f"{words} for {100 * self.share:.0f} % of the cost"


def verdict(groups: Sequence[Group]) -> str:
    """Whether the automatic raise reaches ``mxfp8`` at no more than the cost of the cheapest switch by hand that does.

    Args:
        groups: the runs of one task. A method is compared over the seeds that ``mxfp8`` has too.

    Returns:
        A section of the page; empty where the runs for it are missing.
    """
    base = next((group for group in groups if group.method == "mxfp8"), None)
    if base is None:
        return ""
    outcomes = {group.method: _outcome(group, base) for group in groups if group is not base}
    auto, four = outcomes.get(_AUTO), outcomes.get("mxfp4")
    by_hand = [each for name, each in outcomes.items() if each and name.endswith("-mxfp8") and "auto" not in name]
    if auto is None or not by_hand:
        return ""
    near = f"{_NEAR[auto.metric]} {'nats' if auto.metric == 'perplexity' else 'points'}"
    reaching = sorted((each for each in by_hand if each.reaches), key=lambda each: each.share)
    if reaching:
        by_hand_words = f"The cheapest switch by hand within {near} is `{reaching[0].method}`: {reaching[0]}."
    else:
        best = min(by_hand, key=lambda each: statistics.mean(each.losses))
        by_hand_words = f"No switch by hand ends within {near}; the best is `{best.method}`: {best}."
    if not auto.reaches:
        claim = f"The raise does not reach MXFP8 within {near} here."
    elif not reaching:
        claim = "The raise reaches MXFP8, and no switch by hand does."
    elif auto.share <= reaching[0].share:
        claim = "The raise reaches MXFP8 for no more than the best switch by hand."
    else:
        claim = "The raise reaches MXFP8, but costs more than the best switch by hand."
    if four is not None and four.reaches:
        claim += " MXFP4 throughout reaches it too: these runs are too short to need a raise."
    return f"### The raise\n\nBeside MXFP8 throughout, the automatic raise ends {auto}. {by_hand_words} **{claim}**"


def _outcome(group: Group, base: Group) -> _Outcome | None:
    """``None`` without a seed in common."""
    metric, others = base.records[0]["metric"], {record["seed"]: record for record in base.records}
    pairs = [(record, others[record["seed"]]) for record in group.records if record["seed"] in others]
    if not pairs:
        return None
    if metric == "perplexity":
        losses = tuple(math.log(own["value"] / other["value"]) for own, other in pairs)
    else:
        losses = tuple(other["value"] - own["value"] for own, other in pairs)
    cost, full = (statistics.mean(pair[i]["total_macs"] for pair in pairs) for i in (0, 1))
    return _Outcome(group.method, metric, losses, cost / full)
