"""The lines that a run prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fractrain_fx.engine import Engine, EpochRow
from fractrain_fx.engine.ledger import beside_shares

if TYPE_CHECKING:
    from fractrain_fx.model import FracModel

__all__ = ["announcement", "epoch_line", "step_line"]


def announcement(label: str, model: FracModel, data: str, engine: Engine) -> str:
    """The line before training: model, data and stages."""
    levels = " / ".join(str(level) for level in engine.levels)
    stages = f"stages {levels}{'' if model.frac_config.scheduled else ' % cp'}"
    macs = f"{model.macs:,} forward MACs a sample{beside_shares(model.uncounted)}"
    return (
        f"{label}: {type(model._state.original).__name__}, {macs}, on {data}; "
        f"{stages if model.frac_config.method != 'float' else 'float'}"
    )


def step_line(epoch: int, epochs: int, engine: Engine, loss: float, cp: float) -> str:
    """The progress of a run; ``cp`` is a share 0..1."""
    stage = f"stage {engine.stage + 1}/{len(engine.levels)}"
    more = beside_shares(engine.ledger.uncounted)
    return f"epoch {epoch}/{epochs} {stage} loss {loss:.3f} cp {100 * cp:.2f} %{more}"


def epoch_line(row: EpochRow, metric: str, value: float) -> str:
    """The result of an epoch."""
    return (
        f"epoch {row.epoch:3d}  stage {row.stage + 1} ({row.level})  loss {row.loss:.4f}  "
        f"cp {100 * row.cp:.2f} %  cp_total {100 * row.cp_total:.2f} %{beside_shares(row.uncounted)}  "
        f"test {metric} {value:.2f}"
    )
