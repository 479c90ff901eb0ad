"""Find the model inside its wrappers: data parallelism, compilation, accelerate."""

from __future__ import annotations

import sys
import warnings
from types import MethodType
from typing import Any

import torch
from torch import nn

from fractrain_fx.capture.source import in_words
from fractrain_fx.errors import CaptureError

__all__ = ["adapted_model", "unwrapped"]


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DDP, DataParallel, ``torch.compile`` and the wrappers of ``accelerator.prepare``.

    Wrappers belong around the rewritten model. A warning names each wrapper that was taken off, because code may rely
    on it (DDP averages gradients over processes). Parameters sharded over processes are refused: no process holds the
    model.
    """
    taken: list[str] = []
    while (inner := _unwrapped(model)) is not None:
        taken.append(type(model).__name__)
        model = inner
    if _restore_forward(model):
        taken.append("accelerate's mixed precision")
    _refuse_shards(model)
    if taken:
        warnings.warn(
            f"{' around '.join(taken)} was taken off {type(model).__name__}: wrap (compile, prepare) the rewritten "
            "model instead; restore() gives the inner model",
            stacklevel=4,
        )
    return model


def adapted_model(model: nn.Module) -> nn.Module:
    """The model that PEFT put its adapters into, whose configuration gives its inputs; any other model itself."""
    # A program with a model with adapters has imported this.
    peft: Any = sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftModel):
        base: nn.Module = model.get_base_model()
        return base
    return model


def _unwrapped(model: nn.Module) -> nn.Module | None:
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        inner: nn.Module = model.module
        return inner
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None and isinstance(model, dynamo.OptimizedModule):
        original: nn.Module = model._orig_mod
        return original
    return None


def _restore_forward(model: nn.Module) -> bool:
    """Undo accelerate's mixed precision, which replaces ``forward`` and keeps the model's own."""
    forward = vars(model).get("_original_forward")
    if forward is None:
        return False
    function = getattr(forward, "__func__", None)
    if function is getattr(type(model), "forward", None):
        del model.forward
    else:
        model.forward = forward if function is None else MethodType(function, model)
    del model._original_forward
    return True


def _refuse_shards(model: nn.Module) -> None:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    tensors = sys.modules.get("torch.distributed.tensor")
    sharded = fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules())
    if sharded or (tensors is not None and any(isinstance(p, tensors.DTensor) for p in model.parameters())):
        raise CaptureError(
            f"{in_words(model)} is sharded over processes (FSDP, or DTensor parameters), so that no process holds "
            "the model: call fractrainify first, and shard its result"
        )
    if any(torch.nn.parameter.is_lazy(p) for p in model.parameters()):
        raise CaptureError(
            f"{in_words(model)} has lazy parameters, whose sizes its first call fixes: run it once on a batch, "
            "then rewrite it"
        )
