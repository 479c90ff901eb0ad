"""The optimizer, and its learning rate over the run."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from fractrain_fx.model.loops import param_groups
from fractrain_fx.training.length import RunLength
from fractrain_fx.training.settings import TrainSettings

__all__ = ["lr_factor", "make_optimizer", "make_scheduler"]

_PEAK = {"sgd": 0.1, "adam": 3e-3, "adamw": 3e-3}


def make_optimizer(model: nn.Module, settings: TrainSettings, task: str) -> torch.optim.Optimizer:
    """The optimizer that ``settings`` names, or the default for a task (``classification`` or ``language``)."""
    name = settings.optimizer_for(task)
    lr = _PEAK[name] if settings.lr is None else settings.lr
    # The gates have a group because of their learning rate (make_scheduler).
    parameters = param_groups(model, gates={"weight_decay": settings.weight_decay})
    if name == "sgd":
        return torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=settings.weight_decay)
    kind = torch.optim.Adam if name == "adam" else torch.optim.AdamW
    return kind(parameters, lr, settings.betas, settings.eps, weight_decay=settings.weight_decay)


def make_scheduler(optimizer: torch.optim.Optimizer, length: RunLength) -> LambdaLR:
    """The learning rate over the run: :func:`lr_factor` for the model, and ``gate_lr`` for the gates.

    A new stage moves the target of the gates, and the cost term moves gates by the learning rate times its strength. If
    that strength is bounded (every control but ``multiplier``), gates at the model's rate reach a target late in the
    run too slowly, or never; they can keep the peak rate instead.
    """
    settings = length.settings

    def model_factor(step: int) -> float:
        return lr_factor(length, step)

    def gate_factor(step: int) -> float:
        return settings.gate_lr_factor * (model_factor(step) if settings.gate_lr == "model" else 1.0)

    factors: list[Callable[[int], float]] = [model_factor, gate_factor]
    return LambdaLR(optimizer, factors[: len(optimizer.param_groups)])


def lr_factor(length: RunLength, step: int) -> float:
    """Factor of the peak learning rate in optimizer step ``step``, counted from 0.

    A linear warm-up, then the ``lr_schedule`` of the settings. The milestones of ``steps`` are shares of the run, so
    that a shortened run keeps the shape of a long one.
    """
    settings, steps = length.settings, length.run_steps
    rising = _warm_up_steps(length)
    if step < rising:
        return (step + 1) / rising
    if settings.lr_schedule == "steps":
        return float(settings.lr_decay ** sum(step >= share * steps for share in settings.milestones))
    if settings.lr_schedule == "inverse-sqrt":
        return math.sqrt(rising / (step + 1))
    if settings.lr_schedule == "constant":
        return 1.0
    return (1 + math.cos(math.pi * step / steps)) / 2


def _warm_up_steps(length: RunLength) -> int:
    settings = length.settings
    if settings.warm_up is not None:
        return round(settings.warm_up * length.run_steps)
    return length.epoch_steps if settings.lr_schedule == "cosine" and length.run_steps > length.epoch_steps else 0
