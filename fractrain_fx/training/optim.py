"""The optimizer, its learning rate over the run, and the length of a run."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from fractrain_fx.model.loops import param_groups
from fractrain_fx.training.settings import TrainSettings

__all__ = ["epochs_of_run", "lr_factor", "make_optimizer", "make_scheduler", "steps_of_run"]

_PEAK = {"sgd": 0.1, "adam": 3e-3, "adamw": 3e-3}


def make_optimizer(model: nn.Module, settings: TrainSettings, task: str) -> torch.optim.Optimizer:
    """The optimizer that ``settings`` names, or the default for a task (``classification`` or ``language``)."""
    name = settings.optimizer or ("sgd" if task == "classification" else "adamw")
    lr = _PEAK[name] if settings.lr is None else settings.lr
    # The gates have a group because of their learning rate (make_scheduler).
    parameters = param_groups(model, gates={"weight_decay": settings.weight_decay})
    if name == "sgd":
        return torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=settings.weight_decay)
    kind = torch.optim.Adam if name == "adam" else torch.optim.AdamW
    return kind(parameters, lr, settings.betas, settings.eps, weight_decay=settings.weight_decay)


def make_scheduler(optimizer: torch.optim.Optimizer, settings: TrainSettings, steps_an_epoch: int) -> LambdaLR:
    """The learning rate over the run: :func:`lr_factor` for the model, and ``gate_lr`` for the gates.

    A new stage moves the target of the gates, and the cost term moves gates by the learning rate times its strength. If
    that strength is bounded (every control but ``multiplier``), gates at the model's rate reach a target late in the
    run too slowly, or never; they can keep the peak rate instead.
    """

    def model_factor(step: int) -> float:
        return lr_factor(settings, step, steps_an_epoch)

    def gate_factor(step: int) -> float:
        return settings.gate_lr_factor * (model_factor(step) if settings.gate_lr == "model" else 1.0)

    factors: list[Callable[[int], float]] = [model_factor, gate_factor]
    return LambdaLR(optimizer, factors[: len(optimizer.param_groups)])


def steps_of_run(settings: TrainSettings, steps_an_epoch: int) -> int:
    """Optimizer steps of the whole run."""
    return settings.epochs * steps_an_epoch if settings.iterations is None else settings.iterations


def epochs_of_run(settings: TrainSettings, steps_an_epoch: int) -> int:
    """Epochs of the whole run; the last one may be cut short by ``iterations``."""
    return math.ceil(steps_of_run(settings, steps_an_epoch) / steps_an_epoch)


def lr_factor(settings: TrainSettings, step: int, steps_an_epoch: int) -> float:
    """Factor of the peak learning rate in optimizer step ``step``, counted from 0.

    A linear warm-up, then ``settings.lr_schedule``. The milestones of ``steps`` are shares of the run, so
    that a shortened run keeps the shape of a long one.
    """
    steps = steps_of_run(settings, steps_an_epoch)
    rising = _warm_up_steps(settings, steps, steps_an_epoch)
    if step < rising:
        return (step + 1) / rising
    if settings.lr_schedule == "steps":
        return float(settings.lr_decay ** sum(step >= share * steps for share in settings.milestones))
    if settings.lr_schedule == "inverse-sqrt":
        return math.sqrt(rising / (step + 1))
    if settings.lr_schedule == "constant":
        return 1.0
    return (1 + math.cos(math.pi * step / steps)) / 2


def _warm_up_steps(settings: TrainSettings, steps: int, steps_an_epoch: int) -> int:
    if settings.warm_up is not None:
        return round(settings.warm_up * steps)
    return steps_an_epoch if settings.lr_schedule == "cosine" and steps > steps_an_epoch else 0
