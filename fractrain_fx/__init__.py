"""FracTrain (NeurIPS 2020) for any PyTorch model, as passes over a recorded ``torch.fx`` graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fractrain_fx.api import fractrainify, plan
from fractrain_fx.config import (
    AffineConfig,
    ByLength,
    Constant,
    CostTargets,
    Cyclic,
    Fixed,
    FracConfig,
    GateConfig,
    LossPlateau,
    Manual,
    Pin,
    Precision,
    PrecisionStages,
    RunConfig,
    Steps,
    Tokens,
    TwoStage,
)
from fractrain_fx.engine import Engine
from fractrain_fx.errors import FracTrainError, FracTrainWarning
from fractrain_fx.memory import keep_freed_memory
from fractrain_fx.model import FracModel
from fractrain_fx.summary import Summary, summarize

if TYPE_CHECKING:
    from fractrain_fx.numerics.allocation import allocate
    from fractrain_fx.numerics.sensitivity import sensitivity

__all__ = [
    "AffineConfig",
    "ByLength",
    "Constant",
    "CostTargets",
    "Cyclic",
    "Engine",
    "Fixed",
    "FracConfig",
    "FracModel",
    "FracTrainError",
    "FracTrainWarning",
    "GateConfig",
    "LossPlateau",
    "Manual",
    "Pin",
    "Precision",
    "PrecisionStages",
    "RunConfig",
    "Steps",
    "Summary",
    "Tokens",
    "TwoStage",
    "allocate",
    "fractrainify",
    "keep_freed_memory",
    "plan",
    "sensitivity",
    "summarize",
]

_LATER = {"allocate": "allocation", "sensitivity": "sensitivity"}


def __getattr__(name: str) -> Any:
    """Functions of ``numerics``, which are imported when they are first used."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.numerics.{_LATER[name]}"), name)
