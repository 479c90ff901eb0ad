"""Checkpoints of a run: one folder for each epoch, complete or absent, and read without unpickling."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_model
from torch import Tensor, nn

from fractrain_fx.durable import sync, writing
from fractrain_fx.errors import RunError
from fractrain_fx.model.saved.folder import Weights, read_weights
from fractrain_fx.training.folder.schema import MODEL, STATE, SUMS, TENSORS, VERSION, reading, require_form
from fractrain_fx.training.log.records import METRICS, kept_lines

__all__ = [
    "Checkpoint",
    "latest_checkpoint",
    "load_checkpoint",
    "newest_checkpoint",
    "read_checkpoint",
    "save_checkpoint",
]

_PREFIX = "checkpoint-"


@dataclass(frozen=True)
class Checkpoint:
    """The state that a run needs to continue.

    Attributes:
        epoch: epochs completed.
        config: settings that decide the run's numbers; a run with other settings may not continue from here.
        state: plain values (JSON) of the engine and the trainer.
        tensors: optimizer, learning rate and random number generators: plain containers of tensors and numbers.
        place: the folder that it was read from.
        weights: those of the model, if they were read.
    """

    epoch: int
    config: Mapping[str, Any]
    state: Mapping[str, Any]
    tensors: Mapping[str, Any]
    place: Path = Path()
    weights: Mapping[str, Tensor] | None = None

    def fill(self, model: nn.Module) -> None:
        """Load the weights into a model.

        Raises:
            RunError: they are those of another model.
        """
        assert self.weights is not None
        try:
            model.load_state_dict(self.weights)
        except RuntimeError as error:
            raise RunError(f"{self.place} does not fit this model: take the model it was made with. {error}") from error


def save_checkpoint(out: Path, model: nn.Module | Weights, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint, then delete older ones.

    The folder is written under another name, synced to disk and renamed at the end, so a process that is killed or
    loses power at any moment leaves the checkpoint before it.

    Raises:
        RunError: the run already has a checkpoint of this epoch, or the disk is full or read-only.
    """
    target = out / _name(checkpoint.epoch)
    if target.exists():
        raise RunError(f"{target} already exists: resume that run, or write to another folder")
    draft = out / f".{target.name}.draft"
    shutil.rmtree(draft, ignore_errors=True)
    with writing(target):
        try:
            draft.mkdir(parents=True)
            _write(draft, model, checkpoint)
            draft.rename(target)
            sync(out)
        except OSError:
            shutil.rmtree(draft, ignore_errors=True)  # it takes room on a full disk
            raise
    for other in _checkpoints(out)[:-1]:
        shutil.rmtree(other)
    return target


def _write(draft: Path, model: nn.Module | Weights, checkpoint: Checkpoint) -> None:
    try:
        save_model(model, str(draft / MODEL))  # type: ignore[arg-type]
        torch.save(dict(checkpoint.tensors), draft / TENSORS)
    except (RuntimeError, SafetensorError) as error:  # which both libraries raise for a full disk
        raise OSError(str(error)) from error
    parts = {"config": dict(checkpoint.config), "state": dict(checkpoint.state)}
    state = {"version": VERSION, "epoch": checkpoint.epoch, **parts}
    (draft / STATE).write_text(json.dumps(state, allow_nan=False), encoding="utf-8")
    sums = {name: _digest(draft / name) for name in (MODEL, TENSORS, STATE)}
    (draft / SUMS).write_text(json.dumps(sums), encoding="utf-8")
    for path in (*draft.iterdir(), draft):
        sync(path)


def latest_checkpoint(out: Path) -> Path | None:
    """The folder of the newest checkpoint of a run, if it has one."""
    folders = _checkpoints(out)
    return folders[-1] if folders else None


def load_checkpoint(out: Path, model: nn.Module, config: Mapping[str, Any]) -> Checkpoint:
    """Load the newest checkpoint of a run: weights into ``model``, the rest is returned.

    Args:
        out: the run's folder.
        model: gets the weights, after everything else was found to fit.
        config: the settings of the run that continues.

    Raises:
        RunError: there is no checkpoint, it is damaged, or it belongs to another configuration or model.
    """
    checkpoint = newest_checkpoint(out)
    kept_lines(out / METRICS, checkpoint.epoch)
    _refuse_other_config(checkpoint.place, checkpoint.config, json.loads(json.dumps(dict(config))))
    checkpoint.fill(model)
    return checkpoint


def newest_checkpoint(out: Path) -> Checkpoint:
    """The newest checkpoint of a run with its weights, also of a run that trains and replaces it meanwhile.

    Raises:
        RunError: there is no checkpoint, it is damaged, or a newer version of this package wrote it.
    """
    while (folder := latest_checkpoint(out)) is not None:
        try:
            checkpoint = read_checkpoint(folder)
            with reading(folder):
                return replace(checkpoint, weights=read_weights(folder / MODEL))
        except RunError:
            if folder == latest_checkpoint(out):
                raise
    raise RunError(f"{out} has no checkpoint yet: let fractrain train --resume {out} finish an epoch")


def read_checkpoint(folder: Path) -> Checkpoint:
    """The content of a checkpoint without its weights, after a check of all its files.

    Raises:
        RunError: it is damaged, or a newer version of this package wrote it.
    """
    with reading(folder):
        sums = json.loads((folder / SUMS).read_text(encoding="utf-8"))
        require_form(SUMS, sums)
        for name in (MODEL, TENSORS, STATE):
            if _digest(folder / name) != sums[name]:
                raise ValueError(f"{name} is not as it was written")
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        require_form(STATE, state)
        if state["version"] > VERSION:
            raise RunError(
                f"{folder} was written by a newer version of this package (schema {state['version']}, and this one "
                f"reads {VERSION}): update it"
            )
        try:
            tensors = torch.load(folder / TENSORS, map_location="cpu", weights_only=True)
        except UnpicklingError as error:
            raise ValueError(f"{TENSORS} cannot be read: {error}") from error
        require_form(TENSORS, tensors)
        epoch, rows = state["epoch"], len(state["state"]["engine"]["ledger"]["epochs"])
        if folder.name != _name(epoch) or epoch != rows:
            raise ValueError(f"{STATE} is of epoch {epoch}, with the rows of {rows} epochs")
        return Checkpoint(epoch, state["config"], state["state"], tensors, folder)


def _refuse_other_config(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    differ = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    if differ:
        change = "; ".join(f"{key} was {before.get(key)!r} and is {now.get(key)!r}" for key in differ)
        raise RunError(
            f"{folder} was made with another configuration: {change}. Put it back, or start a new run in another folder"
        )


def _name(epoch: int) -> str:
    return f"{_PREFIX}{epoch:04d}"


def _checkpoints(out: Path) -> list[Path]:
    """Folders of checkpoints, oldest first."""
    folders = [path for path in out.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdecimal()]
    return sorted(folders, key=lambda path: int(path.name.removeprefix(_PREFIX)))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
