"""A run's rows: medians, quartiles and ratios; kept in a JSON file, one run for each model and device."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

__all__ = ["Quartiles", "Row", "Run", "load", "quartiles", "ratios", "save"]


class Quartiles(NamedTuple):
    """The middle of some numbers, and the range that holds their middle half."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """What was measured of one method.

    Attributes:
        method: its name.
        ms: milliseconds of a step.
        ratio: to the eager float32 step of the same round.
        alike: median ratio to float in the same modes (compiled, autocast), where that was measured too.
        saved: bytes that autograd keeps between forward and backward.
        saved_ratio: the same over float's.
        peak, peak_ratio: bytes that a step allocates at most on a GPU.
        waits: how often a step waits for a GPU, by kind; ``None`` off a GPU.
        first: seconds of the first step, compilation included.
        note: why there are no numbers.
    """

    method: str
    ms: Quartiles | None = None
    ratio: Quartiles | None = None
    alike: float | None = None
    saved: int | None = None
    saved_ratio: float | None = None
    peak: int | None = None
    peak_ratio: float | None = None
    waits: dict[str, int] | None = None
    first: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Run:
    """The rows of one model on one device, measured together."""

    model: str
    title: str
    device: str
    batch: int
    rounds: int
    command: str
    machine: dict[str, str]
    rows: list[Row] = field(default_factory=list)

    @property
    def key(self) -> str:
        return f"{self.model}/{self.device}"


def quartiles(values: Sequence[float]) -> Quartiles:
    """Median and quartiles (inclusive method) of one value or more."""
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Quartiles(median, low, high)


def ratios(times: Mapping[str, Sequence[float]], name: str, base: str) -> Quartiles:
    """Of one method's time to another's, round by round: what slows a whole round cancels."""
    return quartiles([mine / other for mine, other in zip(times[name], times[base], strict=True)])


def save(path: Path, run: Run) -> dict[str, Run]:
    """Add a run to the file, in place of an older one of the same model and device; gives all that it holds."""
    runs = load(path) | {run.key: run}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({key: asdict(each) for key, each in runs.items()}, indent=1), encoding="utf-8")
    os.replace(part, path)
    return runs


def load(path: Path) -> dict[str, Run]:
    """The runs of a file, none where it does not exist."""
    if not path.exists():
        return {}
    held = json.loads(path.read_text(encoding="utf-8"))
    return {key: Run(**(run | {"rows": [_row(row) for row in run["rows"]]})) for key, run in held.items()}


def _row(values: dict[str, object]) -> Row:
    spreads = {name: Quartiles(*values[name]) for name in ("ms", "ratio") if values[name]}  # type: ignore[misc]
    return Row(**(values | spreads))  # type: ignore[arg-type]
