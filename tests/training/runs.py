"""Settings of a run of a second, under every method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fractrain_fx.config import CostTargets, PrecisionStages, RunConfig
from fractrain_fx.training import RunSettings, TrainSettings
from fractrain_fx.training.trainer import Trainer
from tests.build import paper

__all__ = ["TINY", "quiet", "settings", "weights"]

TINY = Path(__file__).with_name("tiny.py")


def settings(method: str = "fractrain", function: str = "net", epochs: int = 2, **train: Any) -> RunSettings:
    """The paper's settings, with as many of the last stages as there are epochs."""
    usual = paper(method, schedule="manual", run=RunConfig(length=epochs))
    if method == "pfq":
        usual = usual.replace(stages=PrecisionStages(usual.stages.stages[-epochs:]))
    if method == "fractrain":
        usual = usual.replace(targets=CostTargets((1.5, 2.0, 2.5, 3.0)[-epochs:], saturate=True))
    short: dict[str, Any] = {"epochs": epochs, "batch_size": 32, "lr": 0.05, "device": "cpu"}
    loop = TrainSettings(**short | train)
    return RunSettings(f"{TINY}:{function}", image_size=8, subset=96, train=loop, frac=usual)


def quiet() -> Console:
    return Console(quiet=True)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The state of its model, as it is now."""
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}
