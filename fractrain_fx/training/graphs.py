"""CUDA graphs in the training loop: which runs use them, and gradients that no graph overwrites."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fractrain_fx.training.settings import CUDA_GRAPHS, CompileMode, TrainSettings

__all__ = ["CHOSEN", "LONG_RUN", "OwnGradients", "mode_of_run"]

LONG_RUN = 3000
"""Batches from which on a run on a GPU is compiled by itself.

Compiling takes up to three minutes, and on an H100 a batch of ResNet-38 or a small Transformer saves 40 to 120 ms
(docs/measured/gpu.md).
"""

CHOSEN = ", in CUDA graphs, as this run is long (compile=false: not): the first step takes minutes"


def mode_of_run(settings: TrainSettings, device: torch.device, batches: int) -> CompileMode | None:
    """The mode of ``torch.compile`` for the whole model; ``None``: the model is not compiled whole.

    Args:
        settings: what the user asked for.
        device: where the model is trained.
        batches: training batches of the whole run.
    """
    if settings.compile is not None:
        return settings.compile_mode if settings.compile else None
    by_itself = device.type == "cuda" and batches >= LONG_RUN and settings.mixed_precision != "fp16"
    whole = not (settings.shard or settings.compile_segments or settings.checkpointing)
    return CUDA_GRAPHS[0] if by_itself and whole else None


class OwnGradients:
    """Memory for the gradients of parameters, in which the gradients of several batches add up.

    A CUDA graph of backward writes gradients to the same memory each time it runs. Autograd makes that memory a
    parameter's ``grad``, so the graph's next run would overwrite the gradient of the batch before.

    Args:
        parameters: whose gradients are kept.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self._own: dict[Tensor, Tensor] = {}

    def take(self) -> None:
        """Move gradients out of the graph's memory, between two batches of a step."""
        lent = [(p, p.grad) for p in self._parameters if p.grad is not None and p.grad is not self._own.get(p)]
        if not lent:
            return
        buffers = [self._own.setdefault(p, torch.empty_like(grad)) for p, grad in lent]
        torch._foreach_copy_(buffers, [grad for _, grad in lent])
        for (p, _), buffer in zip(lent, buffers, strict=True):
            p.grad = buffer
