"""The epoch that a run is in: its steps so far, and a part for each stage that it was trained in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from fractrain_fx.engine.ledger import EpochRow
from fractrain_fx.engine.meter import EpochMeter, EpochSums
from fractrain_fx.nn.cost import Cost

__all__ = ["OpenEpoch"]


class OpenEpoch:
    """Adds up the batches of an epoch, apart for each stage.

    Args:
        row: the ledger's row of a part, from its sums.
    """

    def __init__(self, row: Callable[[EpochSums], EpochRow]) -> None:
        self._row = row
        self._begin()

    def _begin(self) -> None:
        self.batches = 0
        """Batches of this process since the epoch began."""
        self.parts: list[EpochRow] = []
        """The parts that are closed."""
        self._meter = EpochMeter()

    def add(self, loss: Tensor, cost: Cost, samples: int, cost_term: Tensor | None = None) -> None:
        """Take a batch, as :meth:`EpochMeter.add`."""
        self.batches += 1
        self._meter.add(loss, cost, samples, cost_term)

    def bad_step(self) -> int:
        """The first batch of this process, counted from 1, whose loss was not finite, or 0. Waits for the device."""
        return self._meter.bad_step()

    def close_part(self) -> EpochSums | None:
        """Close the present part; ``None`` if it has no batch. A collective."""
        if not self._meter.steps:
            return None
        sums, self._meter = self._meter.read(), EpochMeter(self.batches)
        self.parts.append(self._row(sums))
        return sums

    def close(self) -> tuple[list[EpochRow], EpochSums | None, int]:
        """Close the epoch: its parts, the sums of the last one if it had a batch, and the epoch's batches."""
        sums = self.close_part()
        found = self.parts, sums, self.batches
        self._begin()
        return found

    def state_dict(self) -> dict[str, Any]:
        """Plain values (JSON) that continue this epoch; empty between epochs. A collective within one."""
        if not self.batches:
            return {}
        state: dict[str, Any] = {"open_epoch": self._meter.state_dict()} if self._meter.steps else {}
        if self.parts:
            batches = self.batches - self._meter.steps
            state["parts"] = {"batches": batches, "rows": [asdict(part) for part in self.parts]}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` gave."""
        self._begin()
        if "parts" in state:
            self.parts = [EpochRow.from_dict(row) for row in state["parts"]["rows"]]
            self.batches = int(state["parts"]["batches"])
            self._meter = EpochMeter(self.batches)
        if "open_epoch" in state:
            self._meter.load_state_dict(state["open_epoch"])
            self.batches += self._meter.steps
