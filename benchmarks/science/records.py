"""docs/results/science.jsonl: a line for each finished run, and numbers over groups of runs."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from fractrain_fx.durable import write_text

__all__ = [
    "Group",
    "cp_error",
    "difference",
    "gap",
    "groups_of",
    "key_of",
    "merge_records",
    "of_setting",
    "read_records",
    "seeds_and_epochs",
    "static_at",
    "static_of",
]

Record = dict[str, Any]
_AXES = ("task", "method", "setting", "epochs", "seed")


class Group(NamedTuple):
    """Runs that only differ in their seed."""

    task: str
    method: str
    setting: str
    epochs: int
    records: tuple[Record, ...]

    @property
    def metric(self) -> str:
        """What the runs are judged by: ``accuracy`` or ``perplexity``."""
        metric: str = self.records[0]["metric"]
        return metric

    def values(self, name: str) -> list[float]:
        """One field of each run."""
        return [record[name] for record in self.records]

    def mean(self, name: str) -> float:
        """The mean of one field over the runs."""
        return statistics.mean(self.values(name))

    def at_end(self, name: str) -> list[float]:
        """One field of each run's last epoch, for runs that have it."""
        last = [record["points"][-1][name] for record in self.records]
        return [value for value in last if value is not None]


def key_of(record: Record) -> tuple[Any, ...]:
    """The fields that identify a run."""
    return tuple(record[axis] for axis in _AXES)


def read_records(path: Path) -> list[Record]:
    """The lines of a results file; empty if there is no file."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def merge_records(path: Path, records: Iterable[Record]) -> None:
    """Add records to a results file; they replace records of the same runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        merged = {key_of(record): record for record in (*read_records(path), *records)}
        lines = [json.dumps(merged[key]) for key in sorted(merged)]
        write_text(path, "".join(f"{line}\n" for line in lines))


def groups_of(records: Sequence[Record]) -> list[Group]:
    """Groups of runs that only differ in their seed."""
    grouped: dict[tuple[Any, ...], list[Record]] = {}
    for record in sorted(records, key=key_of):
        grouped.setdefault(key_of(record)[:-1], []).append(record)
    return [
        Group(task, method, setting, epochs, tuple(members))
        for (task, method, setting, epochs), members in grouped.items()
    ]


def cp_error(record: Record) -> float | None:
    """The largest relative distance of an epoch's cp from its target, after the first epoch of each stage."""
    errors = []
    level = None
    for point in record["points"]:
        if point["level"].startswith("cp ") and point["level"] == level:
            target = float(point["level"].split()[1])
            errors.append(abs(100 * point["cp"] - target) / target)
        level = point["level"]
    return max(errors, default=None)


def seeds_and_epochs(group: Group) -> tuple[int, int]:
    """How sure the values of a group are: its most seeds count first, then its length."""
    return len(group.records), group.epochs


def static_of(groups: Sequence[Group]) -> list[Group]:
    """Static training at FW-8/BW-8, which the others are compared with, in all lengths."""
    return of_setting(groups, "static", "default")


def of_setting(groups: Sequence[Group], method: str, setting: str) -> list[Group]:
    """The groups of a method in a setting, in all lengths."""
    return [group for group in groups if (group.method, group.setting) == (method, setting)]


def static_at(macs: float, groups: Sequence[Group]) -> float | None:
    """Accuracy of static training whose whole schedule costs ``macs``, between the two lengths nearest to that."""
    ends = sorted((group.mean("total_macs"), group.mean("value")) for group in groups)
    for (low, worse), (high, better) in pairwise(ends):
        if low <= macs <= high:
            return worse + (better - worse) * (macs - low) / (high - low)
    return None


def gap(group: Group, other: float) -> float:
    """The mean last value of a group less another one; perplexities are compared as losses."""
    own = group.mean("value")
    return math.log(own / other) if group.metric == "perplexity" else own - other


def difference(group: Group, base: Group | None) -> float | None:
    """The mean last value less that of other runs, ``None`` for these."""
    return None if base is None or base is group else gap(group, base.mean("value"))
