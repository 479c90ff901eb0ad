"""Find the rewritten model inside another module."""

from __future__ import annotations

from torch import nn

from fractrain_fx.errors import ConfigError
from fractrain_fx.model import FracModel

__all__ = ["model_in"]


def model_in(module: nn.Module) -> FracModel:
    """The one ``FracModel`` that a module holds, at any depth; none and several are refused."""
    models = [part for part in module.modules() if isinstance(part, FracModel)]
    if len(models) == 1:
        return models[0]
    advice = "give it fractrainify(model)" if not models else "say which one, with its engine"
    raise ConfigError(f"{type(module).__name__} holds {len(models)} rewritten models, and one is needed: {advice}")
