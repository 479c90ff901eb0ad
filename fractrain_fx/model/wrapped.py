"""The rewritten model that a user has in hand, maybe inside a wrapper."""

from __future__ import annotations

from typing import Any

from fractrain_fx.engine.steered import steered_model
from fractrain_fx.errors import InputError
from fractrain_fx.model.frac_model import FracModel

__all__ = ["rewritten_in"]


def rewritten_in(model: Any, asked_by: str) -> FracModel:
    """The rewritten model itself, or inside ``torch.compile``, data parallelism or transformers' ``trainer.model``.

    Raises:
        InputError: there is none; the message names the function that was ``asked_by``.
    """
    found = steered_model(model, asked_by)
    if not isinstance(found, FracModel):  # only looks like one, and has no graph
        raise InputError(f"{asked_by} needs a model made by fractrainify, got {type(found).__name__}")
    return found
