"""Parameter groups for any optimizer: the model's weights, those without decay, the gates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fractrain_fx.passes.graph.edit import NAMESPACE

__all__ = ["param_groups"]


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
