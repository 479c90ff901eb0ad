"""The report of a training step, and the lines that a run prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fractrain_fx.config import FracConfig
from fractrain_fx.config.precision import Precision
from fractrain_fx.engine import Engine, EpochRow
from fractrain_fx.engine.rows import beside_shares
from fractrain_fx.engine.steered import show_level
from fractrain_fx.training.length import StepPlace

if TYPE_CHECKING:
    from fractrain_fx.model import FracModel

__all__ = ["EXPLANATION", "StepReport"]
__all__ += ["announcement", "bar_text", "bits_line", "epoch_bits", "epoch_line", "step_line"]

_PINS = 4  # so many are named before training
_SCHEDULED = "scheduled"

EXPLANATION = (
    "cp (cost percentage) 1.50 % means that the layers whose bits the method chooses take 1.50 % of the bit operations "
    "of training them with 32 bits (cp_total: all layers), and FW-4/BW-6 means 4 bits in the forward pass and 6 bits "
    "in the backward pass. A stage is a part of the training with a target or precision of its own."
)
"""The first line of a run: its words, for a reader who has not seen them before."""


@dataclass(frozen=True)
class StepReport:
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
    def at(cls, place: StepPlace, model: FracModel, engine: Engine, loss: Tensor, rate: float) -> StepReport:
        """Report of the step that ran last. It waits for the device."""
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
    """Mean forward bits of each block in an epoch, as in :attr:`StepReport.bits`."""
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


def announcement(label: str, model: FracModel, data: str, engine: Engine) -> str:
    """The line before training: model, data and stages."""
    macs = f"{model.macs:,} forward MACs a sample{beside_shares(model.uncounted)}"
    levels = [show_level(level) for level in engine.levels]
    shared = "" if model.frac_config.scheduled else "target cp "  # named once
    stages = f"{len(levels)} stage{'s' if len(levels) > 1 else ''}: {shared}"
    stages += " / ".join(level.removeprefix("cp ") for level in levels)
    if len(levels) > 1:
        stages += f", by {engine.schedule}"
    if model.frac_config.method == "float":
        stages = "float"
    rules = model.frac_config.pins
    pins = "".join(f"; pin {pin}" for pin in rules[:_PINS])
    more = f"; {len(rules) - _PINS} more pins" if len(rules) > _PINS else ""
    return f"{label}: {type(model._state.original).__name__}, {macs}, on {data}; {stages}{pins}{more}"


def bar_text(report: StepReport) -> str:
    """The words before the progress bar."""
    epoch, stage = f"{report.place.epoch}/{report.place.epochs}", f"{report.stage}/{report.stages}"
    return f"epoch {epoch} stage {stage} loss {report.loss:.3f} {_cost(report)}"


def step_line(report: StepReport, speed: float, left: float) -> str:
    """The progress of a run that has no terminal.

    Args:
        report: the step.
        speed: samples a second.
        left: seconds to the end of the run.
    """
    place = report.place
    return (
        f"epoch {place.epoch}/{place.epochs}  step {place.step}/{place.steps}  stage {report.stage}/{report.stages}  "
        f"loss {report.loss:.4f}  {_cost(report)}  {speed:.1f} samples/s  lr {report.rate:.3g}  "
        f"left {timedelta(seconds=round(left))}"
    )


def epoch_line(row: EpochRow, metric: str, value: float) -> str:
    """The result of an epoch."""
    unit = " %" if metric == "accuracy" else ""
    return f"{row}  test {metric} {value:.2f}{unit}"


def bits_line(bits: dict[str, float]) -> str:
    """The blocks that took fewest and most forward bits in an epoch; empty for fewer than two blocks."""
    if len(bits) < 2:
        return ""
    ordered = sorted(bits, key=lambda block: bits[block])
    mean = sum(bits.values()) / len(bits)
    fewest, most = (f"{bits[block]:.1f} in {block}" for block in (ordered[0], ordered[-1]))
    skips = bits[ordered[0]] < 2  # fewer than any option that computes has
    note = " (a skipped block has 0)" if skips else ""
    return f"           forward bits: {mean:.1f} on average, fewest {fewest}, most {most}{note}"


def _cost(report: StepReport) -> str:
    return f"cp {100 * report.cp:.2f} %{beside_shares(report.uncounted)}"
