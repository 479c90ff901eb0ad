"""Tables that a model makes at its first call and keeps as buffers outside its checkpoint."""

from __future__ import annotations

import torch
from torch import nn

from fractrain_fx.capture.inputs.call import Example
from fractrain_fx.capture.state import Snapshot
from fractrain_fx.capture.surroundings import Surroundings

__all__ = ["fill_caches"]


def fill_caches(model: nn.Module, example: Example, surroundings: Surroundings) -> Snapshot:
    """Let ``model`` make such tables now (relative positions for an image size), and keep nothing else of the run.

    A graph only reads a buffer that the model would first replace by one of another shape, so this must happen before.
    A model that rejects the example is left alone, and its next run reports the error.

    Returns:
        The state of the model after that.
    """
    found: list[tuple[nn.Module, str, torch.Tensor]] = []
    snapshot = Snapshot(model, surroundings)
    shapes = {(module, name): x.shape for module in model.modules() for name, x in _caches(module)}
    call = example.renewed()
    try:
        with snapshot.preserved(), torch.no_grad():
            model.eval()(*call.args, **call.kwargs)
            for module in model.modules():
                found += [(module, name, x) for name, x in _caches(module) if shapes.get((module, name)) != x.shape]
    except Exception:  # a model may raise anything for inputs that it does not take
        return snapshot
    for module, name, x in found:
        module.register_buffer(name, x, persistent=False)
    if not found:
        return snapshot
    del snapshot  # before the next one copies all parameters again
    return Snapshot(model, surroundings)


def _caches(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    buffers = module._buffers
    return [(name, x) for name in module._non_persistent_buffers_set if (x := buffers.get(name)) is not None]
