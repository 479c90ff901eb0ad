"""The length of a run, which the loop around the model knows where the configuration does not say it."""

from __future__ import annotations

import math
from collections.abc import Callable

from fractrain_fx.config.clock import Steps
from fractrain_fx.engine import Engine
from fractrain_fx.engine.schedules import lacks_length
from fractrain_fx.engine.steered import levels_of
from fractrain_fx.model import FracModel

__all__ = ["engine_for", "waits_for_length"]


def waits_for_length(model: FracModel) -> bool:
    """Whether the model's schedule divides a run whose length its configuration does not say."""
    return lacks_length(model.frac_config, levels_of(model))


def engine_for(
    model: FracModel, *, stage_steps: int | None, epochs: int | None, steps: Callable[[], int | None]
) -> Engine:
    """The engine of a model in a loop of known length.

    Args:
        model: the rewritten model. A length in its configuration counts, and the loop is not asked.
        stage_steps: optimizer steps of an epoch of the ledger; ``None``: they are the loop's epochs.
        epochs: epochs of the loop; ``None`` if it has no fixed number.
        steps: gives the optimizer steps of the loop, or ``None``; called only where they are needed.

    Raises:
        ConfigError: the schedule divides the run, and neither configuration nor loop say how long it is in its unit.
    """
    every = model.frac_config.every
    if not waits_for_length(model):
        return Engine(model)
    if every is None and stage_steps is None:
        return Engine(model, epochs=epochs)
    count = steps() if every is None or isinstance(every, Steps) else None
    if every is None and stage_steps is not None:
        return Engine(model, epochs=None if count is None else math.ceil(count / stage_steps))
    return Engine(model, length=None if count is None else Steps(count))
