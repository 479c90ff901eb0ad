"""The lines that a run prints."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from fractrain_fx.engine import Engine, EpochRow
from fractrain_fx.engine.rows import beside_shares
from fractrain_fx.engine.steered import show_level
from fractrain_fx.training.log.look import Look

if TYPE_CHECKING:
    from fractrain_fx.model import FracModel

__all__ = ["EXPLANATION", "announcement", "bar_text", "bits_line", "epoch_line", "step_line"]

EXPLANATION = (
    "cp (cost percentage) 1.50 % means that the layers whose bits the method chooses take 1.50 % of the bit operations "
    "of training them with 32 bits (cp_total: all layers), and FW-4/BW-6 means 4 bits in the forward pass and 6 bits "
    "in the backward pass. A stage is a part of the training with a target or precision of its own."
)
"""The first line of a run: its words, for a reader who has not seen them before."""


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
    pins = "".join(f"; pin {pin}" for pin in model.frac_config.pins)
    return f"{label}: {type(model._state.original).__name__}, {macs}, on {data}; {stages}{pins}"


def bar_text(look: Look) -> str:
    """The words before the progress bar."""
    place = look.place
    return f"epoch {place.epoch}/{place.epochs} stage {look.stage}/{look.stages} loss {look.loss:.3f} {_cost(look)}"


def step_line(look: Look, speed: float, left: float) -> str:
    """The progress of a run that has no terminal.

    Args:
        look: the step.
        speed: samples a second.
        left: seconds to the end of the run.
    """
    place = look.place
    return (
        f"epoch {place.epoch}/{place.epochs}  step {place.step}/{place.steps}  stage {look.stage}/{look.stages}  "
        f"loss {look.loss:.4f}  {_cost(look)}  {speed:.1f} samples/s  lr {look.rate:.3g}  "
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


def _cost(look: Look) -> str:
    return f"cp {100 * look.cp:.2f} %{beside_shares(look.uncounted)}"
