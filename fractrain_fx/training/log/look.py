"""A look at a running training step: its place, loss, cost and the bits of each block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fractrain_fx.config import FracConfig
from fractrain_fx.config.precision import Precision
from fractrain_fx.engine import Engine, EpochRow
from fractrain_fx.training.length import StepPlace

if TYPE_CHECKING:
    from fractrain_fx.model import FracModel

__all__ = ["Look", "epoch_bits"]

_SCHEDULED = "scheduled"


@dataclass(frozen=True)
class Look:
    """The state of a run after one of its steps.

    Attributes:
        place: the step.
        stage, stages: the stage, counted from 1, and the number of all.
        loss: task loss of the batch.
        cp, cp_total: cost of the batch as shares 0..1.
        rate: the model's learning rate.
        bits: mean forward bits of each block in the batch, where skipping counts as 0; one entry for all scheduled ops
            together if the method has no gates.
        uncounted: number of contractions that no formula counts.
    """

    place: StepPlace
    stage: int
    stages: int
    loss: float
    cp: float
    cp_total: float
    rate: float
    bits: dict[str, float]
    uncounted: int = 0

    @classmethod
    def at(cls, place: StepPlace, model: FracModel, engine: Engine, loss: Tensor, rate: float) -> Look:
        """A look at the step that ran last. It waits for the device."""
        return cls(
            place=place,
            stage=engine.stage + 1,
            stages=len(engine.levels),
            loss=float(loss.detach()),
            cp=float(model.cost.cp.detach()),
            cp_total=float(model.cost.cp_total.detach()),
            rate=rate,
            bits=_batch_bits(model, engine),
            uncounted=engine.ledger.uncounted,
        )


def epoch_bits(row: EpochRow, config: FracConfig) -> dict[str, float]:
    """Mean forward bits of each block in an epoch, as in :attr:`Look.bits`."""
    if row.options:
        return {block: _mean(shares, config.gate_options) for block, shares in row.options.items()}
    return {_SCHEDULED: float(Precision.parse(row.level).fw)} if config.scheduled else {}


def _batch_bits(model: FracModel, engine: Engine) -> dict[str, float]:
    choices = model.cost.choice
    if choices:
        shares = torch.stack([choice.detach().float().mean(dim=0) for choice in choices.values()]).tolist()
        return {block: _mean(row, model.frac_config.gate_options) for block, row in zip(choices, shares, strict=True)}
    level = engine.level
    return {_SCHEDULED: float(level.fw)} if model.frac_config.scheduled and isinstance(level, Precision) else {}


def _mean(shares: Sequence[float], options: Sequence[Precision]) -> float:
    return sum(share * option.fw for share, option in zip(shares, options, strict=True))
