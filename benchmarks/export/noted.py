"""Whether the notes of a file say all that its outputs differ by: evaluation with what they name, beside the file."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.export.ties import rounded_inputs, share
from fractrain_fx import FracModel
from fractrain_fx.capture.trees import tensors_in
from fractrain_fx.export.rounding import FrozenRounding

__all__ = ["as_noted_in_torchao", "as_noted_in_transformers"]


class _Given(nn.Module):
    """Stands for a rounding, and gives the values of a file."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = values

    def forward(self, x: Tensor) -> Tensor:
        """The values of the file."""
        return self.values.view(x.shape)


@torch.no_grad()
def as_noted_in_torchao(model: FracModel) -> float:
    """The difference between a file of torchao and evaluation that leaves activations float."""
    recording = model._state.recording
    loaded = copy.deepcopy(model._state.original).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.export(folder, format="torchao")
        loaded.load_state_dict(torch.load(Path(folder) / "model.pt", weights_only=True), assign=True)
    plain = model.deployed()
    for path in [path for path, module in plain.named_modules() if isinstance(module, FrozenRounding)]:
        plain.set_submodule(path, nn.Identity())
    ours, theirs = (_output(variant(*recording.args, **recording.kwargs)) for variant in (plain, loaded))
    return share(ours, theirs)


@torch.no_grad()
def as_noted_in_transformers(model: FracModel) -> float:
    """The difference between a file of compressed-tensors and evaluation in its type with its rounded activations."""
    recording = model._state.recording
    kwargs = {name: x for name, x in recording.kwargs.items() if name != "labels"}
    with tempfile.TemporaryDirectory() as folder:
        model.export(folder, format="compressed-tensors", batches=[dict(recording.kwargs)])
        loaded: Any = type(model._state.original).from_pretrained(folder).eval()  # type: ignore[attr-defined]
    with rounded_inputs(loaded) as given:
        theirs = _output(loaded(**kwargs))
    plain = model.deployed().to(theirs.dtype)
    for path, values in given.items():
        plain.set_submodule(path, _Given(values))
    return share(_output(plain(**kwargs)).float(), theirs.float())


def _output(output: Any) -> Tensor:
    return next(tensors_in(getattr(output, "logits", output)))
