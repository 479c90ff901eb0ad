"""Refuse transformers' Trainer as it is: it would train a rewritten model without the cost term and without stages."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from fractrain_fx.engine.steered import is_steered
from fractrain_fx.errors import ConfigError

__all__ = ["refuse_plain_trainer"]


def refuse_plain_trainer(model: Any) -> None:
    """Refuse a Trainer that moves a model, or switches it to training, and whose loss has no cost term.

    Raises:
        ConfigError: names the mixin and the callback that bring an engine.
    """
    transformers: Any = sys.modules.get("transformers.trainer")
    if transformers is None:
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        trainer = frame.f_locals.get("self") if frame.f_globals is vars(transformers) else None
        if isinstance(trainer, transformers.Trainer):
            if is_steered(model) and _may_add_cost(trainer, transformers.Trainer):
                return
            name = type(trainer).__name__
            raise ConfigError(
                f"{name} would train this model without the cost term and without stages. From "
                f"fractrain_fx.integrations.huggingface take FracTrainMixin: class MyTrainer(FracTrainMixin, {name}), "
                "and MyTrainer(model, ...); or, where the class is fixed, callback = FracTrainCallback(model), and "
                f"{name}(callback.model, ..., callbacks=[callback])"
            )
        frame = frame.f_back


def _may_add_cost(trainer: Any, plain: Any) -> bool:
    """Whether a Trainer has a loss of its own, or trains the model that the mixin or the callback made."""
    kind = type(trainer)
    own = kind.compute_loss is not plain.compute_loss or kind.training_step is not plain.training_step
    # The constructor moves the model before it keeps these; training looks again.
    given = getattr(trainer, "compute_loss_func", trainer)
    return own or given is not None or "_frac_model" in vars(trainer.model)
