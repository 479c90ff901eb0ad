"""Tables that a model makes for itself at its first call, and keeps as buffers outside its checkpoint."""

from __future__ import annotations

import torch
from torch import nn

from fractrain_fx.capture.inputs.call import Example
from fractrain_fx.capture.state import Snapshot

__all__ = ["fill_caches"]


def fill_caches(model: nn.Module, example: Example) -> Snapshot:
    """Let ``model`` make such tables now (relative positions for an image size, say), and keep nothing else of the run.

    A graph reads a buffer where the model would first replace it by one of another shape, so that has to have happened.
    A model that rejects the example is left alone: whoever runs it next says so.

    Returns:
        The model as it is then.
    """
    found: list[tuple[nn.Module, str, torch.Tensor]] = []
    snapshot = Snapshot(model)
    shapes = {(module, name): x.shape for module in model.modules() for name, x in _caches(module)}
    call = example.renewed()
    try:
        with snapshot.kept(), torch.no_grad():
            model.eval()(*call.args, **call.kwargs)
            for module in model.modules():
                found += [(module, name, x) for name, x in _caches(module) if shapes.get((module, name)) != x.shape]
    except Exception:  # whatever a model says to inputs that it does not take
        return snapshot
    for module, name, x in found:
        module.register_buffer(name, x, persistent=False)
    return Snapshot(model) if found else snapshot


def _caches(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    buffers = module._buffers
    return [(name, x) for name in module._non_persistent_buffers_set if (x := buffers.get(name)) is not None]
