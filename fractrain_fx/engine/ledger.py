"""The cost of a run, epoch by epoch, in full-precision MACs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from fractrain_fx.engine.clock import RunClock
from fractrain_fx.engine.meter import EpochMeter, EpochSums
from fractrain_fx.engine.rows import EpochRow, cost_share, joined_parts, pure_rows, stages_text, table, turning_rows
from fractrain_fx.engine.steered import show_level
from fractrain_fx.nn.cost import Cost

__all__ = ["Ledger"]

_ENDS = 5  # rows at the beginning and at the end of a ledger's table


class Ledger:
    """The rows of all epochs and their totals, and the sums of the epoch that is open, apart for each stage.

    ``macs`` are forward MACs of one sample of the example's sizes, and ``training_macs`` those of training on it with
    nothing frozen. No formula counts the ``uncounted`` contractions.
    """

    def __init__(self, macs: int, training_macs: int, uncounted: int = 0, levels: Sequence[str] = ()) -> None:
        self.macs = macs
        self._training_macs = training_macs
        self.uncounted = uncounted
        self.levels = tuple(levels)
        self.rows: list[EpochRow] = []
        self._open_epoch()

    def _open_epoch(self, parts: Iterable[EpochRow] = (), batches: int = 0) -> None:
        self.batches = batches
        """Batches of this process since the epoch began."""
        self._parts = list(parts)
        self._meter = EpochMeter(batches)

    def add(
        self, loss: Tensor, cost: Cost, samples: int, cost_term: Tensor | None = None, labels: Tensor | None = None
    ) -> None:
        """Take a batch, as :meth:`EpochMeter.add`."""
        self.batches += 1
        self._meter.add(loss, cost, samples, cost_term, labels)

    def bad_step(self) -> int:
        """As :meth:`EpochMeter.bad_step`, of the part that is open."""
        return self._meter.bad_step()

    def close_part(self, stage: int, clock: RunClock) -> EpochSums | None:
        """Close the part of the epoch that was trained in a stage; ``None`` if it has no batch. A collective."""
        if not self._meter.steps:
            return None
        sums, self._meter = self._meter.read(), EpochMeter(self.batches)
        part = EpochRow(
            epoch=len(self.rows) + 1,
            stage=stage,
            level=self.levels[stage],
            loss=sums.loss if math.isfinite(sums.loss) else None,
            samples=sums.samples,
            options=sums.options,
            uncounted=self.uncounted,
            relative_macs=round(sums.macs / max(self._training_macs, 1), 6),  # counted in single precision
            steered=sums.steered,
            step=clock.steps,
            tokens=clock.tokens,
            **sums.shares,  # type: ignore[arg-type]
        )
        self._parts.append(part)
        return sums

    def close_epoch(self, stage: int, clock: RunClock) -> EpochSums | None:
        """Append the epoch's row; returns the sums of the last part, if that has a batch. A collective."""
        sums = self.close_part(stage, clock)
        self.rows.append(self._parts[0] if len(self._parts) == 1 else joined_parts(self._parts))
        self._open_epoch()
        return sums

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

        ``M`` are the model's forward MACs. ``cp_total`` is a share of the cost of the trained parts, for samples of
        their size: frozen parts and smaller samples lower ``3 * M``.
        """
        return 3 * self.macs * sum(row.cp_total * row.full_samples for row in pure_rows(self.rows))

    @property
    def mean_cp(self) -> float:
        """The share (0..1) of the full-precision cost of the run that cp is over; NaN before the first sample."""
        return self._mean("cp")

    @property
    def mean_cp_total(self) -> float:
        """The share (0..1) of the full-precision cost of training that was spent; NaN before the first sample."""
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

    def open_dict(self) -> dict[str, Any]:
        """Plain values that continue the open epoch; empty between epochs. A collective within one."""
        state: dict[str, Any] = {"open_epoch": self._meter.state_dict()} if self._meter.steps else {}
        if self._parts:
            batches = self.batches - self._meter.steps
            state["parts"] = {"batches": batches, "rows": [asdict(part) for part in self._parts]}
        return state

    def load_open_dict(self, values: Mapping[str, Any]) -> None:
        """Continue from what ``open_dict`` gave."""
        parts = values.get("parts", {"rows": (), "batches": 0})
        self._open_epoch(map(EpochRow.from_dict, parts["rows"]), int(parts["batches"]))
        if "open_epoch" in values:
            self._meter.load_state_dict(values["open_epoch"])
            self.batches += self._meter.steps

    def _mean(self, name: str) -> float:
        if not self.samples:
            return math.nan
        return cost_share(self.rows, name)
