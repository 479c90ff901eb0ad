"""Refuse transformers' Trainer as it is: it would train a rewritten model without the cost term and without stages."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from fractrain_fx.engine.steered import is_steered
from fractrain_fx.errors import ConfigError

__all__ = ["refuse_plain_trainer"]


def refuse_plain_trainer(model: Any) -> None:
    """Refuse a Trainer that moves a model, or switches it to training, that no engine steers.

    Raises:
        ConfigError: names the mixin and the callback that bring an engine.
    """
    transformers: Any = sys.modules.get("transformers.trainer")
    if transformers is None or is_steered(model):
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals is vars(transformers) and isinstance(frame.f_locals.get("self"), transformers.Trainer):
            name = type(frame.f_locals["self"]).__name__
            raise ConfigError(
                f"{name} would train this model without the cost term and without stages. From "
                f"fractrain_fx.integrations.huggingface take FracTrainMixin: class MyTrainer(FracTrainMixin, {name}), "
                "and MyTrainer(model, ...); or, where the class is fixed, callback = FracTrainCallback(model), and "
                f"{name}(callback.model, ..., callbacks=[callback])"
            )
        frame = frame.f_back
