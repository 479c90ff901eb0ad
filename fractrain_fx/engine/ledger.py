"""The cost of a run, epoch by epoch, in full-precision MACs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from fractrain_fx.engine.clock import RunClock
from fractrain_fx.engine.meter import EpochSums

__all__ = ["EpochRow", "Ledger", "beside_shares", "pure_rows", "turning_rows"]


@dataclass(frozen=True)
class EpochRow:
    """One epoch. Costs are shares 0..1 of full-precision training, means over samples (paper 4.1).

    Attributes:
        epoch: counted from 1.
        stage: the stage during the epoch, counted from 0; if it changed, the stage at the epoch's end.
        level: the level of that stage: a precision, a target cp in per cent, or ``float``.
        loss: mean task loss, or ``None`` if it was not finite.
        cp: over the gated (or scheduled) ops.
        cp_total: over every contraction of the model.
        fw, eb, gc: the cost of forward pass, error back-propagation and gradient computation, each as a share of its
            own cost at full precision, over the same ops as ``cp``.
        samples: training samples seen in this epoch.
        options: for each block, the share of samples that chose each option.
        uncounted: number of contractions that no formula counts. No share includes them.
        trained: full-precision MACs of a step at the epoch's end, as a share 0..1 of those with nothing frozen.
        step: optimizer steps of the run until the epoch's end; 0 if the loop does not say when they end.
        tokens: tokens of the run until then, if stages are counted in tokens.
        parts: the parts of the epoch, a row for each stage, if the stage changed in it.
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
    step: int = 0
    tokens: int = 0
    parts: tuple[EpochRow, ...] = ()

    @property
    def pure(self) -> tuple[EpochRow, ...]:
        """Rows of one stage each: the parts, or this row itself."""
        return self.parts or (self,)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EpochRow:
        """Read what ``dataclasses.asdict`` gave, also from JSON; fields that are missing have their defaults."""
        options = {block: tuple(map(float, shares)) for block, shares in values["options"].items()}
        parts = tuple(map(cls.from_dict, values.get("parts", ())))
        return cls(**{**values, "options": options, "parts": parts})


def beside_shares(uncounted: int) -> str:
    """The suffix of a printed share of cost: the number of contractions it leaves out; empty if none."""
    return f" (+{uncounted} uncounted)" if uncounted else ""


def pure_rows(rows: Iterable[EpochRow]) -> list[EpochRow]:
    """The rows of epochs, those with several stages in their parts."""
    return [part for row in rows for part in row.pure]


def turning_rows(rows: Iterable[EpochRow]) -> list[EpochRow]:
    """The rows, or parts of rows, after which another stage began."""
    pure = pure_rows(rows)
    return [before for before, after in pairwise(pure) if before.stage != after.stage]


def _together(parts: Sequence[EpochRow]) -> EpochRow:
    """One row for the parts of an epoch: means over samples, and the stage at its end."""
    samples = sum(part.samples for part in parts)

    def mean(values: Iterable[float]) -> float:
        return sum(part.samples * value for part, value in zip(parts, values, strict=True)) / samples

    losses = [part.loss for part in parts if part.loss is not None]
    shares = {block: [part.options[block] for part in parts] for block in parts[0].options}
    return replace(
        parts[-1],
        loss=mean(losses) if len(losses) == len(parts) else None,
        cp=mean(part.cp for part in parts),
        cp_total=mean(part.cp_total for part in parts),
        fw=mean(part.fw for part in parts),
        eb=mean(part.eb for part in parts),
        gc=mean(part.gc for part in parts),
        samples=samples,
        options={block: tuple(map(mean, zip(*own, strict=True))) for block, own in shares.items()},
        parts=tuple(parts),
    )


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

    def row(self, sums: EpochSums, stage: int, level: str, trained: float, clock: RunClock) -> EpochRow:
        """The row of the open epoch, or of a part of it."""
        return EpochRow(
            epoch=len(self.rows) + 1,
            stage=stage,
            level=level,
            loss=sums.loss if math.isfinite(sums.loss) else None,
            samples=sums.samples,
            options=sums.options,
            uncounted=self.uncounted,
            trained=trained,
            step=clock.steps,
            tokens=clock.tokens,
            **sums.shares,  # type: ignore[arg-type]
        )

    def close_epoch(self, parts: Sequence[EpochRow]) -> EpochRow:
        """Append the row of the epoch that ended, from those of its parts."""
        self.rows.append(parts[0] if len(parts) == 1 else _together(parts))
        return self.rows[-1]

    @property
    def samples(self) -> int:
        """Training samples seen."""
        return sum(row.samples for row in self.rows)

    @property
    def total_macs(self) -> float:
        """Training cost so far in full-precision MACs: ``3 * M * cp_total`` for each sample.

        ``M`` are the model's forward MACs. ``cp_total`` is a share of the cost of the trained parts. Frozen parts lower
        ``3 * M``.
        """
        return 3 * self.macs * sum(row.cp_total * row.samples * row.trained for row in pure_rows(self.rows))

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
        """Epochs, counted from 1, in or after which another stage began."""
        return tuple(row.epoch for row in turning_rows(self.rows))

    @property
    def turning_steps(self) -> tuple[int, ...]:
        """Optimizer steps after which another stage began; 0 where the loop does not say when steps end."""
        return tuple(row.step for row in turning_rows(self.rows))

    def to_dict(self) -> dict[str, Any]:
        """Plain values: the rows and their totals."""
        totals = {"macs": self.macs, "samples": self.samples, "total_macs": self.total_macs}
        means = {"mean_cp": self.mean_cp, "mean_cp_total": self.mean_cp_total} if self.rows else {}
        return totals | means | {"epochs": [asdict(row) for row in self.rows]}

    def load_dict(self, values: Mapping[str, Any]) -> None:
        """Continue from what ``to_dict`` gave."""
        self.macs = int(values["macs"])
        self.rows = [EpochRow.from_dict(row) for row in values["epochs"]]

    def _mean(self, name: str) -> float:
        if not self.rows:
            return math.nan
        return float(sum(getattr(row, name) * row.samples for row in self.rows)) / self.samples
