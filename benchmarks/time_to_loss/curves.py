"""The results of a run: seconds and validation losses of each method, and when it reached a loss."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from benchmarks.records import Quartiles, quartiles, ratios

__all__ = ["Curve", "Reached", "Run", "Target", "run_of", "targets"]

# Number of validations whose mean counts as the loss, because a single one fluctuates.
SMOOTHED = 3


class Reached(NamedTuple):
    """Steps and seconds until a loss was reached."""

    steps: int
    seconds: float


class Target(NamedTuple):
    """A loss to reach, and the method whose final loss it is (``""`` for a round number)."""

    loss: float
    final_of: str = ""


@dataclass(frozen=True)
class Curve:
    """The results of one method.

    Attributes:
        method: name of the method.
        setup: seconds before the first step, mostly for rewriting.
        seconds: seconds of each step.
        validation: pairs of steps and validation loss.
        ledger: result of ``Ledger.to_dict``; ``None`` without an engine.
        beside: seconds of the float steps of the same rounds, if only a few steps were measured.
        note: the reason that only a few steps were measured.
    """

    method: str
    setup: float
    seconds: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    ledger: dict[str, Any] | None = None
    beside: list[float] | None = None
    note: str = ""

    def replace(self, **changes: Any) -> Curve:
        return dataclasses.replace(self, **changes)

    @property
    def smooth(self) -> list[tuple[int, float]]:
        """Steps, and the mean of the validation loss there and the two before."""
        windows = zip(*(self.validation[offset:] for offset in range(SMOOTHED)), strict=False)
        return [(window[-1][0], statistics.fmean(loss for _, loss in window)) for window in windows]

    @property
    def final(self) -> float:
        """The last smooth loss; NaN if there is none."""
        return self.smooth[-1][1] if self.smooth else math.nan

    @property
    def trained(self) -> bool:
        """Whether it was trained, and not only timed for a few steps."""
        return not self.note

    @property
    def ms(self) -> Quartiles:
        """Milliseconds of a step."""
        return quartiles([1000 * duration for duration in self.seconds])

    @property
    def skipped(self) -> float | None:
        """Share (0..1) of samples that skipped a block, mean over epochs and blocks, all of which can be skipped."""
        epochs = (self.ledger or {}).get("epochs", [])
        skipped = [row["samples"] * _skipped(row["options"]) for row in epochs if row["options"]]
        return sum(skipped) / sum(row["samples"] for row in epochs) if skipped else None

    @property
    def cp_total(self) -> float | None:
        """Share (0..1) of the full-precision training cost that was spent, as simulated."""
        return None if self.ledger is None else self.ledger["mean_cp_total"]

    @property
    def turning_points(self) -> list[int]:
        """Epochs, counted from 1, after which another stage began."""
        rows = [] if self.ledger is None else self.ledger["epochs"]
        return [old["epoch"] for old, new in pairwise(rows) if old["stage"] != new["stage"]]

    def reached(self, loss: float) -> Reached | None:
        """The first validation with a smooth loss of at most ``loss``; ``None`` if there is none."""
        spent = list(accumulate(self.seconds))
        return next((Reached(step, spent[step - 1]) for step, smooth in self.smooth if smooth <= loss), None)

    def ratio(self, base: Curve) -> Quartiles:
        """The ratio of a step to that of ``base`` in the same round."""
        other = base.seconds if self.beside is None else self.beside
        return ratios({"mine": self.seconds, "other": other}, "mine", "other")


def _skipped(options: dict[str, Sequence[float]]) -> float:
    return statistics.fmean(shares[0] for shares in options.values())


@dataclass(frozen=True)
class Run:
    """All curves of one run, with its settings."""

    title: str
    settings: dict[str, Any]
    command: str
    machine: dict[str, str]
    curves: list[Curve]

    @property
    def float_curve(self) -> Curve:
        return next(curve for curve in self.curves if curve.method == "float")


def run_of(values: dict[str, Any]) -> Run:
    """A run from the plain values of ``dataclasses.asdict``."""
    curves = [
        Curve(**(curve | {"validation": [(step, loss) for step, loss in curve["validation"]]}))
        for curve in values["curves"]
    ]
    return Run(**(values | {"curves": curves}))


def targets(curves: Sequence[Curve]) -> list[Target]:
    """Losses for the table, highest first: the final loss of each method, and three round numbers that all reach."""
    curves = [curve for curve in curves if curve.smooth]
    if not curves:
        return []
    worst = max(curve.final for curve in curves)
    highest = min(curve.smooth[0][1] for curve in curves)
    steps = {math.ceil(10 * (worst + share * max(0.0, highest - worst))) / 10 for share in (0, 0.25, 0.5)}
    rows = [*(Target(loss) for loss in steps), *(Target(curve.final, curve.method) for curve in curves)]
    return sorted(rows, key=lambda target: -target.loss)
