"""The cost of a run, epoch by epoch, in full-precision MACs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fractrain_fx.engine.meter import EpochSums

__all__ = ["EpochRow", "Ledger", "beside_shares"]


@dataclass(frozen=True)
class EpochRow:
    """One epoch. Costs are shares 0..1 of full-precision training, means over samples (ALGORITHM 4).

    Attributes:
        epoch: counted from 1.
        stage: the stage during the epoch, counted from 0.
        level: the level of that stage: a precision, a target cp in per cent, or ``float``.
        loss: mean task loss, or ``None`` if it was not finite.
        cp: over the gated (or scheduled) ops.
        cp_total: over every contraction of the model.
        fw, eb, gc: forward, error-backward and gradient parts of the cost over the same ops as ``cp``.
        samples: training samples seen in this epoch.
        options: for each block, the share of samples that chose each option.
        uncounted: number of contractions that no formula counts. No share includes them.
        trained: full-precision MACs of a step at the epoch's end, as a share 0..1 of those with nothing frozen.
    """

    epoch: int
    stage: int
    level: str
    loss: float | None
    cp: float
    cp_total: float
    fw: float
    eb: float
    gc: float
    samples: int
    options: dict[str, tuple[float, ...]]
    uncounted: int = 0
    trained: float = 1.0


def beside_shares(uncounted: int) -> str:
    """The suffix of a printed share of cost: the number of contractions it leaves out; empty if none."""
    return f" (+{uncounted} uncounted)" if uncounted else ""


class Ledger:
    """The rows of all epochs, and their totals.

    Args:
        macs: forward MACs of one sample.
        uncounted: number of contractions that no formula counts.
    """

    def __init__(self, macs: int, uncounted: int = 0) -> None:
        self.macs = macs
        self.uncounted = uncounted
        self.rows: list[EpochRow] = []

    def close_epoch(self, sums: EpochSums, stage: int, level: str, trained: float = 1.0) -> EpochRow:
        """Append the row of the epoch that ended."""
        row = EpochRow(
            epoch=len(self.rows) + 1,
            stage=stage,
            level=level,
            loss=sums.loss if math.isfinite(sums.loss) else None,
            samples=sums.samples,
            options=sums.options,
            uncounted=self.uncounted,
            trained=trained,
            **sums.shares,
        )
        self.rows.append(row)
        return row

    @property
    def samples(self) -> int:
        """Training samples seen."""
        return sum(row.samples for row in self.rows)

    @property
    def total_macs(self) -> float:
        """Training cost so far in full-precision MACs: ``3 * M * cp_total`` for each sample (ALGORITHM 7).

        ``cp_total`` is a share of the cost of the trained parts. Frozen parts lower ``3 * M``.
        """
        return 3 * self.macs * sum(row.cp_total * row.samples * row.trained for row in self.rows)

    @property
    def mean_cp(self) -> float:
        """Mean over samples of cp, 0..1; NaN before the first epoch."""
        return self._mean("cp")

    @property
    def mean_cp_total(self) -> float:
        """Mean over samples of cp_total, 0..1: the share of the full-precision training cost that was spent."""
        return self._mean("cp_total")

    @property
    def turning_points(self) -> tuple[int, ...]:
        """Epochs, counted from 1, after which another stage began."""
        pairs = zip(self.rows, self.rows[1:], strict=False)
        return tuple(before.epoch for before, after in pairs if before.stage != after.stage)

    def to_dict(self) -> dict[str, Any]:
        """Plain values: the rows and their totals."""
        totals = {"macs": self.macs, "samples": self.samples, "total_macs": self.total_macs}
        means = {"mean_cp": self.mean_cp, "mean_cp_total": self.mean_cp_total} if self.rows else {}
        return totals | means | {"epochs": [asdict(row) for row in self.rows]}

    def load_dict(self, values: Mapping[str, Any]) -> None:
        """Continue from what ``to_dict`` gave."""
        self.macs = int(values["macs"])
        self.rows = [
            EpochRow(**{**row, "options": {block: tuple(shares) for block, shares in row["options"].items()}})
            for row in values["epochs"]
        ]

    def _mean(self, name: str) -> float:
        if not self.rows:
            return math.nan
        return float(sum(getattr(row, name) * row.samples for row in self.rows)) / self.samples
