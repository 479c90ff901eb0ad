"""Refuse other libraries' trainers as they are: they would train without the cost term and without stages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from fractrain_fx.engine.steered import is_steered
from fractrain_fx.errors import ConfigError

__all__ = ["refuse_plain_fit", "refuse_plain_trainer"]

_LIGHTNINGS = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")


def refuse_plain_trainer(model: Any) -> None:
    """Refuse transformers' Trainer that moves a model, or switches it to training, and whose loss has no cost term.

    Raises:
        ConfigError: names the mixin and the callback that bring an engine.
    """
    transformers: Any = sys.modules.get("transformers.trainer")
    if transformers is None:
        return
    for trainer in _callers(transformers, "Trainer"):
        if is_steered(model) and _may_add_cost(trainer, transformers.Trainer):
            return
        name = type(trainer).__name__
        raise ConfigError(
            f"{name} would train this model without the cost term and without stages. From "
            f"fractrain_fx.integrations.huggingface take FracTrainMixin: class MyTrainer(FracTrainMixin, {name}), "
            "and MyTrainer(model, ...); or, where the class is fixed, callback = FracTrainCallback(model), and "
            f"{name}(callback.model, ..., callbacks=[callback])"
        )


def refuse_plain_fit(model: Any) -> None:
    """Refuse Lightning's Trainer that fits a model which no engine steers.

    Raises:
        ConfigError: names the callback that brings an engine.
    """
    if is_steered(model):
        return
    for name in _LIGHTNINGS:
        for trainer in _callers(sys.modules.get(name), "Trainer"):
            if trainer.training:
                raise ConfigError(
                    "Lightning would train this model without the cost term and without stages: write "
                    "Trainer(callbacks=[FracTrainCallback()]), from fractrain_fx.integrations.lightning"
                )


def _callers(module: Any, kind: str) -> Iterator[Any]:
    """The objects of a class of a module whose methods, written in that module, are running; the innermost first."""
    frame: FrameType | None = sys._getframe(1) if module is not None else None
    while frame is not None:
        caller = frame.f_locals.get("self") if frame.f_globals is vars(module) else None
        if isinstance(caller, getattr(module, kind)):
            yield caller
        frame = frame.f_back


def _may_add_cost(trainer: Any, plain: Any) -> bool:
    """Whether a Trainer has a loss of its own, or trains the model that the mixin or the callback made."""
    kind = type(trainer)
    own = kind.compute_loss is not plain.compute_loss or kind.training_step is not plain.training_step
    # The constructor moves the model before it keeps these; training looks again.
    given = getattr(trainer, "compute_loss_func", trainer)
    return own or given is not None or "_frac_model" in vars(trainer.model)
