"""Builds the C++ kernels for ``backend="auto"`` where a run takes longer than building them."""

from __future__ import annotations

import math
import os

import torch
from rich.console import Console
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fractrain_fx.capture.state import in_mode
from fractrain_fx.config import FracConfig
from fractrain_fx.errors import ConfigError
from fractrain_fx.native import kernels
from fractrain_fx.native.choice import choose_rounding, mark_reported
from fractrain_fx.training.length import RunLength
from fractrain_fx.training.models import BuiltModel
from fractrain_fx.training.settings import RunSettings

__all__ = ["float_seconds", "prepare_rounding"]

# What one thread computes in float32 training: 1e10 to 6e10 for the small networks and the processors that were
# measured. A computed time, unlike a measured one, lets equal commands on one machine make equal choices.
_MACS_A_SECOND = 2e10

# Building takes some 80 seconds of one core, and kernels save 0.13 (PFQ) to 0.42 (DFQ) of float's time.
_WORTH_SECONDS = 300.0


def prepare_rounding(settings: RunSettings, built: BuiltModel, console: Console) -> FracConfig:
    """The configuration to rewrite the model with, after building the kernels if a run is worth that.

    Args:
        settings: settings of the run.
        built: the model, on the CPU, and its data.
        console: is told of a build, which takes a while, and of the choice where the run is not on a CPU.

    Returns:
        That of ``settings``; with another ``backend`` than ``auto`` where the run is not on a CPU, or where building
        failed.
    """
    config = settings.frac
    if config.run.backend != "auto":
        return config
    main = os.environ.get("RANK", "0") == "0"  # the group of processes does not exist yet
    if settings.train.device != "cpu" and torch.accelerator.is_available():
        choice = choose_rounding(config, torch.device(torch.accelerator.current_accelerator() or "cpu"))
        if main and choice.reason:
            console.print(str(choice), highlight=False, markup=False, soft_wrap=True)
        return config.replace(**{"run.backend": choice.used})
    choice = choose_rounding(config, torch.device("cpu"))
    if not choice.hint:
        return config
    mark_reported(choice)
    expected = float_seconds(settings, built)
    if expected < _WORTH_SECONDS:
        return config
    if main:
        words = (
            f"building C++ kernels, once, because this run would take roughly {expected / 60:.0f} minutes even in float"
        )
        console.print(words, highlight=False, markup=False, soft_wrap=True)
    try:
        kernels()
    except ConfigError as error:
        if main:
            console.print(f"not built: {error}", highlight=False, markup=False, soft_wrap=True)
        return config.replace(**{"run.backend": "plain"})
    return config


def float_seconds(settings: RunSettings, built: BuiltModel) -> float:
    """A rough time of the run in float on this CPU, from its MACs."""
    loop = settings.train
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    length = RunLength(loop, math.ceil(len(built.data.train) / (loop.batch_size * processes)))
    samples = length.batches_before(length.epochs) * loop.batch_size
    training = 3 * samples * _forward_macs(built, settings.frac.run.batch_axis)
    return training / (_MACS_A_SECOND * torch.get_num_threads())


def _forward_macs(built: BuiltModel, batch_axis: int) -> float:
    """MACs of one sample."""
    args, kwargs = built.examples()
    with torch.no_grad(), FlopCounterMode(display=False) as counter, in_mode(built.model, training=False):
        built.model(*args, **kwargs)
    first: Tensor = (*args, *kwargs.values())[0]
    return float(counter.get_total_flops()) / 2 / first.shape[batch_axis]
