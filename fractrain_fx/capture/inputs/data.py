"""Models whose tensors have shapes and no data: too large for this machine, and made on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor

from fractrain_fx.capture.source import error_line, in_words
from fractrain_fx.capture.trees import map_copies
from fractrain_fx.errors import CaptureError, FracTrainError, InputError

__all__ = ["has_data", "needs_data", "rejection", "without_data"]


def has_data(model: nn.Module) -> bool:
    """Whether the tensors of a model have values; fake tensors are refused, and models where only some have values."""
    tensors = [*model.parameters(), *model.buffers()]
    kind = in_words(model)
    if any(isinstance(x, FakeTensor) for x in tensors):
        raise CaptureError(
            f"{kind} holds fake tensors, which work only inside the mode that made them: build the model under "
            'torch.device("meta") instead'
        )
    without = [name for name, x in model.named_parameters() if x.is_meta]
    if without and any(not p.is_meta for p in model.parameters()):
        raise CaptureError(
            f"{kind} has parameters with and without data ({without[0]!r} is on the meta device): load all of them, or "
            'build the whole model under torch.device("meta")'
        )
    return not any(x.is_meta for x in tensors)


def without_data(inputs: Any) -> Any:
    """The same inputs on the meta device."""
    return map_copies(inputs, lambda x: torch.empty_like(x, device="meta", requires_grad=x.requires_grad))


def needs_data(model: nn.Module, path: str, error: Exception) -> FracTrainError:
    """The error for a model on the meta device that fails in the module at ``path``."""
    kind = type(model).__name__
    where = f"module {path!r} ({type(model.get_submodule(path)).__name__})" if path else f"{kind} itself"
    if isinstance(error, NotImplementedError) or "meta" in str(error).lower():
        return CaptureError(
            f"{where} reads values, and tensors on the meta device have none ({type(error).__name__}: {error})"
            f"{_at(error)}: build the model on a device that holds its data; fewer layers may fit, and their plan "
            "tells the rest"
        )
    return rejection(where, error)


def rejection(where: str, error: Exception) -> InputError:
    """The error for a model, or a module named by ``where``, that fails on its example inputs."""
    return InputError(
        f"{where} rejects the example inputs{_at(error)}: {type(error).__name__}: {str(error).rstrip('.')}. Pass "
        "example_inputs=(...) and example_kwargs={...} as you call the model"
    )


def _at(error: Exception) -> str:
    line = error_line(error)
    return f" at {line}" if line else ""
