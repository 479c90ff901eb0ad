"""The cost of a run, epoch by epoch, in full-precision MACs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from fractrain_fx.config.kinds import check_kinds
from fractrain_fx.engine.clock import RunClock
from fractrain_fx.engine.meter import EpochSums
from fractrain_fx.engine.steered import show_level

__all__ = ["EpochRow", "Ledger", "beside_shares", "pure_rows", "stages_text", "table", "turning_rows"]


_ENDS = 5  # rows at the beginning and at the end of a ledger's table


@dataclass(frozen=True)
class EpochRow:
    """One epoch. Costs are shares 0..1 of full-precision training, means over samples (paper 4.1).

    Attributes:
        epoch: counted from 1.
        stage: the stage during the epoch, counted from 0; if it changed, the stage at the epoch's end.
        level: the level of that stage: a precision, a target cp in per cent, or ``float``.
        loss: mean task loss, or ``None`` if it was not finite or all batches were empty.
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

    def __str__(self) -> str:
        """The epoch in one line."""
        return (
            f"epoch {self.epoch:3d}  stage {self.stage + 1} ({show_level(self.level)})  loss {self.loss_text}  "
            f"cp {100 * self.cp:.2f} %  cp_total {100 * self.cp_total:.2f} %{beside_shares(self.uncounted)}"
        )

    @property
    def loss_text(self) -> str:
        """The mean task loss in words."""
        if not self.samples:
            return "of no sample"
        return "not finite" if self.loss is None else f"{self.loss:.4f}"

    @property
    def pure(self) -> tuple[EpochRow, ...]:
        """Rows of one stage each: the parts, or this row itself."""
        return self.parts or (self,)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EpochRow:
        """Read what ``dataclasses.asdict`` gave, also from JSON; fields that are missing have their defaults.

        Raises:
            KeyError, TypeError, ValueError: ``values`` is something else.
        """
        options = {block: tuple(map(float, shares)) for block, shares in values["options"].items()}
        parts = tuple(map(cls.from_dict, values.get("parts", ())))
        row = cls(**{**values, "options": options, "parts": parts})
        check_kinds(row)
        return row


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


def stages_text(rows: Iterable[EpochRow], levels: Sequence[str]) -> str:
    """The stages that a run had, each with its share of the samples.

    Args:
        rows: its epochs.
        levels: the level of each stage.
    """
    pure = pure_rows(rows)
    samples = [sum(row.samples for row in pure if row.stage == stage) for stage in range(len(levels))]
    had = [
        f"{show_level(level)} for {100 * count / sum(samples):.0f} %"
        for level, count in zip(levels, samples, strict=True)
        if count
    ]
    left_out = [show_level(level) for level, count in zip(levels, samples, strict=True) if not count]
    return f"stages: {', '.join(had) or 'none'} of the samples" + (f"; never {', '.join(left_out)}" if left_out else "")


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Columns of text, aligned to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
    rows = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (heads, *lines))
    return "\n".join(row.rstrip() for row in rows)


def _together(parts: Sequence[EpochRow]) -> EpochRow:
    """One row for the parts of an epoch: means over samples, and the stage at its end."""
    samples = sum(part.samples for part in parts)

    def mean(values: Iterable[float]) -> float:
        return sum(part.samples * value for part, value in zip(parts, values, strict=True)) / max(samples, 1)

    losses = [part.loss for part in parts if part.samples]
    shares = {block: [part.options[block] for part in parts] for block in parts[0].options}
    return replace(
        parts[-1],
        loss=mean(part.loss or 0.0 for part in parts) if losses and None not in losses else None,
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
        levels: the level of each stage of the run, as rows have it.
    """

    def __init__(self, macs: int, uncounted: int = 0, levels: Sequence[str] = ()) -> None:
        self.macs = macs
        self.uncounted = uncounted
        self.levels = tuple(levels)
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
    def stages(self) -> str:
        """The stages that the run had, in one line; empty before the first epoch."""
        return stages_text(self.rows, self.levels) if self.rows else ""

    def __str__(self) -> str:
        """A line for each epoch, and one for the stages."""
        return "\n".join([*map(str, self.rows), *filter(None, [self.stages])]) or "no epoch yet"

    def __repr__(self) -> str:
        """A table of the first and the last epochs."""
        heads = ("epoch", "stage", "level", "loss", "cp, %", "cp_total, %", "samples")
        lines: list[tuple[str, ...]] = [
            (
                str(row.epoch),
                str(row.stage + 1),
                show_level(row.level),
                row.loss_text,
                f"{100 * row.cp:.2f}",
                f"{100 * row.cp_total:.2f}",
                f"{row.samples:,}",
            )
            for row in self.rows
        ]
        if len(lines) > 2 * _ENDS + 1:
            lines[_ENDS:-_ENDS] = [("...",) * len(heads)]
        spent = f", mean cp {100 * self.mean_cp:.2f} %, {self.total_macs:.3e} MACs at 32 bits" if self.samples else ""
        return f"Ledger: {len(self.rows)} epochs{spent}\n{table(heads, lines)}"

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
        """Mean over samples of cp, 0..1; NaN before the first sample."""
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
        means = {"mean_cp": self.mean_cp, "mean_cp_total": self.mean_cp_total} if self.samples else {}
        return totals | means | {"epochs": [asdict(row) for row in self.rows]}

    def load_dict(self, values: Mapping[str, Any]) -> None:
        """Continue from what ``to_dict`` gave."""
        self.macs = int(values["macs"])
        self.rows = [EpochRow.from_dict(row) for row in values["epochs"]]

    def _mean(self, name: str) -> float:
        if not self.samples:
            return math.nan
        return float(sum(getattr(row, name) * row.samples for row in self.rows)) / self.samples
