"""A short training on scikit-learn's digits: float, static FW-8/BW-8 and FracTrain, as ``make demo`` runs them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.gpu.setting import Setting
from fractrain_fx import FracConfig, GateConfig, RunConfig
from fractrain_fx.training import RunSettings, TrainSettings, new_run
from fractrain_fx.training.settings import Device

__all__ = ["HOW", "items"]

HOW = """
timm's `resnet10t` on scikit-learn's 1,797 digits at 16 x 16 pixels, batch 64, one seed, by `fractrain`'s own loop with
evaluation and checkpoints. `CUDA graphs` is `--compile --set compile_mode=reduce-overhead`.
""".strip()

_FRACTRAIN = FracConfig.paper(schedule="by-length", gate=GateConfig(control="multiplier"))
_CONFIGS = {
    "float": FracConfig(method="float"),
    "FracTrain": _FRACTRAIN,
    "static FW-8/BW-8": FracConfig(method="static"),
    "FracTrain, CUDA graphs": _FRACTRAIN,
    "FracTrain, auto": _FRACTRAIN.replace(run=RunConfig(skipping="left-out")),
}


def items(setting: Setting) -> Mapping[str, Any]:
    """One item for each training."""
    names = list(_CONFIGS)[:2] if setting.small else _CONFIGS
    return {name: partial(_rows, name, setting) for name in names}


def _rows(name: str, setting: Setting) -> Iterator[dict[str, Any]]:
    device: Device = "cuda" if setting.device == "cuda" else "cpu"
    train = TrainSettings(epochs=30, iterations=2 if setting.small else None, batch_size=64, device=device)
    if name.endswith("CUDA graphs"):
        train = replace(train, compile=True, compile_mode="reduce-overhead")
    settings = RunSettings(model="timm:resnet10t", data="digits", image_size=16, train=train, frac=_CONFIGS[name])
    with tempfile.TemporaryDirectory() as folder:
        result = new_run(settings, Path(folder) / "run", Console(quiet=True)).fit()
    yield {
        "run": name,
        "epochs": result.epochs,
        "seconds": result.seconds,
        "test accuracy, %": result.value,
        "best, %": result.best,
        "mean cp, %": 100 * result.mean_cp,
        "cp_total, %": 100 * result.mean_cp_total,
    }
