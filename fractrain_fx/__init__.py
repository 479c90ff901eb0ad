"""FracTrain (NeurIPS 2020) for any PyTorch model, as passes over a recorded ``torch.fx`` graph."""

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
    tuned_config,
)
from fractrain_fx.engine import Engine
from fractrain_fx.errors import FracTrainError, FracTrainWarning
from fractrain_fx.memory import keep_freed_memory
from fractrain_fx.model import FracModel
from fractrain_fx.summary import Summary, summarize

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
    "fractrainify",
    "keep_freed_memory",
    "plan",
    "summarize",
    "tuned_config",
]
