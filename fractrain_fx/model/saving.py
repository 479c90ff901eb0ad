"""Write a rewritten model to disk and read it: recipe, example inputs and weights, never a pickled graph."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.fx.passes.infra.pass_base import PassBase

from fractrain_fx.capture.inputs.wrappers import unwrapped
from fractrain_fx.config import FracConfig
from fractrain_fx.errors import InputError, RunError
from fractrain_fx.model.frozen.packing import CODES, Packable, pack
from fractrain_fx.model.state import ModelState
from fractrain_fx.rewriting import Rewritten, record_model, rewrite

__all__ = ["FILES", "Weights", "load", "load_weights", "read_weights", "save"]

_RECIPE, _EXAMPLES, _WEIGHTS = "config.json", "example_inputs.safetensors", "model.safetensors"
FILES = (_RECIPE, _EXAMPLES, _WEIGHTS)
_FORMAT = 1


def save(model: nn.Module, state: ModelState, directory: Path) -> None:
    """Write ``config.json``, ``example_inputs.safetensors`` and ``model.safetensors``.

    ``rounding="auto"`` is written as that, because the machine that reads it may have no compiler.

    Of a sharded model the first process writes whole weights; all must call this.

    Args:
        model: has the weights to write.
        state: the state of the model.
        directory: made if it does not exist.

    Raises:
        ModelError: modules or parameters of the original were replaced.
    """
    state.as_recorded.require_structure("save_pretrained would write a recipe and weights that do not fit together")
    whole = model.state_dict() if state.sharding is None else state.sharding.whole(model)
    if whole is not None:
        _write(whole, state, directory)
    if state.sharding is not None:
        dist.barrier()  # the others may read it next


def _write(weights: dict[str, Tensor], state: ModelState, directory: Path) -> None:
    from safetensors.torch import save_file, save_model

    tensors: dict[str, Tensor] = {}
    recording = state.recording
    call = _pack({"args": list(recording.args), "kwargs": dict(recording.kwargs)}, tensors)
    recipe = {
        "fractrain_fx": _FORMAT,
        "architecture": type(state.original).__name__,
        "config": state.config.to_dict() | {"rounding": state.rounding.asked},
        "example_inputs": call,
        "passes": state.chain,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / _RECIPE).write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / _EXAMPLES)
    save_model(Weights(weights), str(directory / _WEIGHTS))  # type: ignore[arg-type]


class Weights:
    """A state dict with the interface of a module that ``safetensors.torch.save_model`` needs to find tied tensors."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self._weights = weights

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors."""
        return self._weights


def load(directory: Path, model: nn.Module, passes: Sequence[PassBase] | None = None) -> Rewritten:
    """Rewrite a fresh model by the recipe in a directory.

    Raises:
        RunError: a file is missing or damaged, or another chain of passes wrote it.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        recipe = json.loads((directory / _RECIPE).read_text(encoding="utf-8"))
        tensors = load_file(directory / _EXAMPLES)
    except (OSError, ValueError, SafetensorError) as error:
        raise RunError(f"{directory} does not hold a model that save_pretrained wrote: {error}") from error
    if not isinstance(recipe, dict) or recipe.get("fractrain_fx") != _FORMAT:
        raise RunError(f"{directory / _RECIPE} is not a recipe of this version; write it again with save_pretrained")
    model = unwrapped(model)
    if recipe["architecture"] != type(model).__name__:
        raise RunError(f"{directory} holds a {recipe['architecture']}, but model= is a {type(model).__name__}")
    call = _unpack(recipe["example_inputs"], tensors)
    config = FracConfig.from_dict(recipe["config"])
    chain = None if passes is None else [type(each).__name__ for each in passes]
    wrote = recipe.get("passes")
    if wrote != chain:
        made = "the default passes" if wrote is None else f"another chain ({', '.join(wrote)})"
        raise RunError(f"the model in {directory} was rewritten by {made}: give from_pretrained the same passes=")
    return rewrite(model, record_model(model, config, call["args"], call["kwargs"]), config, passes)


def load_weights(model: Packable, original: nn.Module, directory: Path) -> None:
    """Load the weights that :func:`save` wrote into a rewritten model.

    Raises:
        RunError: the file is missing or damaged, or its weights are of another model.
    """
    from safetensors import SafetensorError

    try:
        weights = read_weights(directory / _WEIGHTS)
        if packed := {key.removesuffix(CODES) for key in weights if key.endswith(CODES)}:
            pack(model._state, packed)
        model.load_state_dict(weights)
    except (OSError, RuntimeError, SafetensorError) as error:
        kind = type(original).__name__
        raise RunError(f"the weights in {directory} cannot be loaded into {kind}: {error}") from error


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file that ``safetensors.torch.save_model`` wrote, under all of their names."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        # A tensor with several names is written once; the file says under which name.
        shared = {name: kept for name, kept in (file.metadata() or {}).items() if kept in state}
    return state | {name: state[kept] for name, kept in shared.items()}


def _pack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Nested arguments as JSON; tensors go to ``tensors`` under a number."""
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().clone()
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": {str(key): _pack(each, tensors) for key, each in value.items()}}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_pack(each, tensors) for each in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InputError(
        f"an example input of type {type(value).__name__} cannot be written to {_RECIPE}: "
        "save state_dict() and call fractrainify again instead"
    )


def _unpack(packed: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _unpack(each, tensors) for key, each in content.items()}
    items = [_unpack(each, tensors) for each in content]
    return tuple(items) if kind == "tuple" else items
