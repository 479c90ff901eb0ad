"""What training loops ask of a model: parameter groups, and a refusal of trainers that would ignore the method."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from fractrain_fx.capture.source import outward
from fractrain_fx.engine.steered import is_steered
from fractrain_fx.errors import ConfigError
from fractrain_fx.passes.graph.edit import NAMESPACE

__all__ = ["param_groups", "refuse_plain_fit", "refuse_plain_trainer"]

_LIGHTNINGS = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")


def param_groups(
    model: nn.Module, *, gates: Mapping[str, Any] | None = None, decay_norms_and_biases: bool = True
) -> list[dict[str, Any]]:
    """Every parameter of a model once, in groups that torch's optimizers and timm's take; codes are left out.

    Args:
        model: a ``FracModel``, or any module (which has no gates).
        gates: options of a last group for the inserted parameters, such as ``{"lr": 0.1}``; without weight decay by
            default. ``None`` leaves the gates with the weights.
        decay_norms_and_biases: ``False`` puts the model's vectors and scalars (norms, biases, scales) into a group
            without weight decay.

    Returns:
        Dictionaries with ``params`` and maybe ``weight_decay`` and the options of ``gates``; none is empty.
    """
    weights, vectors, inserted = [], [], []
    for name, parameter in model.named_parameters():
        if not (parameter.is_floating_point() or parameter.is_complex()):
            continue  # codes of a frozen weight
        if gates is not None and name.startswith(f"{NAMESPACE}."):
            inserted.append(parameter)
        elif not decay_norms_and_biases and parameter.ndim <= 1:
            vectors.append(parameter)
        else:
            weights.append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": weights},
        {"params": vectors, "weight_decay": 0.0},
        {"params": inserted, "weight_decay": 0.0, **(gates or {})},
    ]
    return [group for group in groups if group["params"]]


def refuse_plain_trainer(model: Any) -> None:
    """Refuse a model that a Trainer of transformers moves or switches to training, if its loss has no cost term."""
    transformers: Any = sys.modules.get("transformers.trainer")
    if transformers is None:
        return
    for trainer in _callers(transformers):
        if is_steered(model) and _may_add_cost(trainer, transformers.Trainer):
            return
        name = type(trainer).__name__
        raise ConfigError(
            f"{name} would train this model without the cost term and without stages. From "
            f"fractrain_fx.integrations.huggingface take FracTrainMixin: class MyTrainer(FracTrainMixin, {name}), "
            "and MyTrainer(model, ...); or, where the class is fixed, callback = FracTrainCallback(model), and "
            f"{name}(callback.model, ..., callbacks=[callback])"
        )


def refuse_plain_fit(model: Any) -> None:
    """Refuse Lightning's Trainer that fits a model which no engine steers."""
    if is_steered(model):
        return
    for name in _LIGHTNINGS:
        for trainer in _callers(sys.modules.get(name)):
            if trainer.training:
                raise ConfigError(
                    "Lightning would train this model without the cost term and without stages: write "
                    "Trainer(callbacks=[FracTrainCallback()]), from fractrain_fx.integrations.lightning"
                )


def _callers(module: Any) -> Iterator[Any]:
    """The trainers of a module whose methods, written in that module, are running; the innermost first."""
    for frame in outward(sys._getframe(1)) if module is not None else ():
        caller = frame.f_locals.get("self") if frame.f_globals is vars(module) else None
        if isinstance(caller, module.Trainer):
            yield caller


def _may_add_cost(trainer: Any, plain: Any) -> bool:
    """Whether a Trainer has a loss of its own, or trains the model that the mixin or the callback made."""
    kind = type(trainer)
    own_loss = kind.compute_loss is not plain.compute_loss or kind.training_step is not plain.training_step
    # The constructor moves the model before it keeps these; training looks again.
    loss_func = getattr(trainer, "compute_loss_func", trainer)
    return own_loss or loss_func is not None or "_frac_model" in vars(trainer.model)
