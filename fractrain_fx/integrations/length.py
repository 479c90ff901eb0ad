"""The length of a run, which the loop around the model knows."""

from __future__ import annotations

import math

from fractrain_fx.config.clock import Amount, Steps
from fractrain_fx.engine import Engine
from fractrain_fx.engine.schedules import lacks_length
from fractrain_fx.engine.steered import SteeredModel, levels_of
from fractrain_fx.errors import ConfigError

__all__ = ["check_stage_steps", "engine_for", "waits_for_length"]


def waits_for_length(model: SteeredModel) -> bool:
    """Whether the model's schedule divides a run whose length its configuration does not say."""
    return lacks_length(model.frac_config, levels_of(model))


def check_stage_steps(stage_steps: int | None, every: Amount | None = None) -> None:
    """Check the optimizer steps of an epoch of the ledger: at least 1, and not given beside a schedule's ``every``."""
    if stage_steps is None:
        return
    if stage_steps < 1:
        raise ConfigError(f"stage_steps={stage_steps} must be at least 1 optimizer step, or None for epochs")
    if every is not None:
        raise ConfigError(
            f"stage_steps={stage_steps} and every={str(every)!r} both say when the stage may change: leave stage_steps "
            "out"
        )


def engine_for(
    model: SteeredModel, engine: Engine | None, *, stage_steps: int | None, epochs: int | None, steps: int | None
) -> Engine:
    """The engine of a loop, which is told the loop's length; a length in the model's configuration divides the run.

    Args:
        model: the model that the loop trains.
        engine: its engine, if there is one already.
        stage_steps: optimizer steps of an epoch of the ledger; by default these are the loop's epochs.
        epochs: of the loop; ``None`` if it has no fixed number.
        steps: optimizer steps of the loop; ``None`` if it has no fixed number.
    """
    if stage_steps is not None:
        epochs = None if steps is None else math.ceil(steps / stage_steps)
    if engine is None:
        every = model.frac_config.schedule.every
        if not waits_for_length(model):
            engine = Engine(model)
        elif every is None:
            engine = Engine(model, epochs=epochs)
        else:
            engine = Engine(model, length=Steps(steps) if steps is not None and isinstance(every, Steps) else None)
    engine.expect(epochs=epochs, steps=steps if stage_steps is None else None)
    return engine
