"""Checkpoints of a run: one folder an epoch, whole or not there at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch import nn

from fractrain_fx.errors import RunError

__all__ = ["Checkpoint", "latest_checkpoint", "load_checkpoint", "save_checkpoint"]

_PREFIX = "checkpoint-"


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on.

    Attributes:
        epoch: epochs completed.
        state: plain values (JSON): the engine and what the trainer remembers.
        tensors: optimizer, learning rate and random number generators: plain containers of tensors and numbers.
    """

    epoch: int
    state: Mapping[str, Any]
    tensors: Mapping[str, Any]


def save_checkpoint(out: Path, model: nn.Module, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint, then drop the older ones.

    Everything is written under another name and renamed at the end, so that an interrupted run keeps the one before.
    """
    target = out / f"{_PREFIX}{checkpoint.epoch:04d}"
    draft = out / f".{target.name}.draft"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    save_model(model, str(draft / "model.safetensors"))
    torch.save(dict(checkpoint.tensors), draft / "training.pt")
    state = {"epoch": checkpoint.epoch, **checkpoint.state}
    (draft / "state.json").write_text(json.dumps(state, allow_nan=False), encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    draft.rename(target)
    for other in out.glob(f"{_PREFIX}*"):
        if other != target:
            shutil.rmtree(other)
    return target


def latest_checkpoint(out: Path) -> Path | None:
    """The folder of the newest checkpoint of a run, if it has one."""
    return max(out.glob(f"{_PREFIX}*"), default=None)


def load_checkpoint(out: Path, model: nn.Module) -> Checkpoint:
    """Load the newest checkpoint of a run: weights into ``model``, the rest is returned.

    Raises:
        RunError: there is none, it is damaged, or it belongs to another model.
    """
    folder = latest_checkpoint(out)
    if folder is None:
        raise RunError(f"{out} holds no checkpoint: give the folder of a run that fractrain train has started")
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        tensors = torch.load(folder / "training.pt", map_location="cpu", weights_only=True)
    except (OSError, EOFError, ValueError, RuntimeError, UnpicklingError) as error:
        raise RunError(f"{folder} is damaged ({error}): start the run again") from error
    try:
        load_model(model, str(folder / "model.safetensors"))
    except (OSError, RuntimeError) as error:
        raise RunError(f"{folder} does not fit this model: resume with the model it was made with. {error}") from error
    return Checkpoint(epoch=int(state.pop("epoch")), state=state, tensors=tensors)
