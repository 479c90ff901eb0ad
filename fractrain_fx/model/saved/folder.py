"""Write a rewritten model to disk and read it: recipe, example inputs and weights, never a pickled graph."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx.passes.infra.pass_base import PassBase

from fractrain_fx.capture.inputs.examples_hf import is_hugging_face
from fractrain_fx.capture.inputs.wrappers import unwrapped
from fractrain_fx.config import FracConfig
from fractrain_fx.durable import write_text
from fractrain_fx.engine.steered import noted_run
from fractrain_fx.errors import InputError, RunError
from fractrain_fx.model.frozen.packing import CODES, Packable, pack
from fractrain_fx.model.saved.card import card_text
from fractrain_fx.model.state import ModelState
from fractrain_fx.passes import ops_of
from fractrain_fx.passes.graph.edit import NAMESPACE
from fractrain_fx.rewriting import Rewritten, record_model, rewrite

__all__ = ["FILES", "Weights", "architecture_in", "load", "load_weights", "read_weights", "save"]

_RECIPE, _EXAMPLES = "fractrain_fx.json", "example_inputs.safetensors"
_WEIGHTS, _INSERTED = "model.safetensors", "fractrain_fx.safetensors"
_CONFIG, _CARD = "config.json", "README.md"  # the names that transformers and the Hub read
FILES = (_RECIPE, _EXAMPLES, _WEIGHTS, _INSERTED, _CONFIG, _CARD)
_FORMAT = 1


def save(model: Packable, directory: Path, name: str, *, together: bool = False) -> None:
    """Write recipe, example inputs, weights and card; ``name`` is the model's in its card.

    The original's weights are in a file of their own, beside the original's ``config.json`` if transformers can load
    it. ``backend="auto"`` is written as that, because the machine that reads it may have no compiler. ``together``
    writes all tensors into one file, as a trainer's checkpoint needs them.

    Of a sharded model the first process writes whole weights; all must call this.
    """
    state = model._state
    state.as_recorded.require_structure("save_pretrained would write a recipe and weights that do not fit together")
    whole = model.state_dict() if state.sharding is None else state.sharding.whole(model)
    if whole is not None:
        packed = any(key.endswith(CODES) for key in whole)
        loads = not packed and is_hugging_face(state.original)  # with transformers, as the float model
        _write(whole, state, directory, together)
        _write_config(state.original, whole, directory, loads)
        macs = sum(op.macs or 0 for _, op in ops_of(state.recording.train.graph))
        card = card_text(state, noted_run(model), name, macs=macs, loads=loads)
        write_text(directory / _CARD, card)
    if state.sharding is not None:
        dist.barrier()  # the others may read it next


def _write_config(original: nn.Module, weights: dict[str, Tensor], directory: Path, loads: bool) -> None:
    """Write the configuration that transformers reads, or one that it refuses in a sentence."""
    if not loads:
        stub = {"architecture": type(original).__name__, "load_with": "fractrain_fx.FracModel.from_pretrained"}
        write_text(directory / _CONFIG, json.dumps(stub, indent=2) + "\n")
        return
    config: Any = copy.deepcopy(original.config)
    config.architectures = [type(original).__name__]
    config.dtype = next((x.dtype for x in weights.values() if x.is_floating_point()), torch.float32)
    config.save_pretrained(directory)
    generation: Any = getattr(original, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(directory)


def _write(weights: dict[str, Tensor], state: ModelState, directory: Path, together: bool) -> None:
    from safetensors.torch import save_file, save_model

    tensors: dict[str, Tensor] = {}
    recording = state.recording
    call = _pack({"args": list(recording.args), "kwargs": dict(recording.kwargs)}, tensors)
    recipe = {
        "fractrain_fx": _FORMAT,
        "architecture": type(state.original).__name__,
        "config": state.config.replace(**{"run.backend": state.rounding.asked}).to_dict(),
        "example_inputs": call,
        "passes": _names(state.passes),
        "named": _named(state.original),
    }
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / _RECIPE, json.dumps(recipe, indent=2) + "\n")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / _EXAMPLES)
    (directory / _INSERTED).unlink(missing_ok=True)
    originals = {key: x for key, x in weights.items() if together or not key.startswith(f"{NAMESPACE}.")}
    inserted = {key: x for key, x in weights.items() if key not in originals}
    for tensors, name in ((originals, _WEIGHTS), (inserted, _INSERTED)):
        if tensors:
            save_model(Weights(tensors), str(directory / name), metadata={"format": "pt"})  # type: ignore[arg-type]


def _named(model: nn.Module) -> dict[str, Any] | None:
    """The name of a timm model and its number of classes, as a recipe keeps them; ``None`` for other models."""
    config: Any = getattr(model, "pretrained_cfg", None)
    name = config.get("architecture") if isinstance(config, dict) else None
    return {"timm": name, "num_classes": getattr(model, "num_classes", None)} if name else None


class Weights:
    """A state dict with the interface of a module that ``safetensors.torch.save_model`` needs to find tied tensors."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self._weights = weights

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors."""
        return self._weights


def load(directory: Path, model: nn.Module, passes: Sequence[PassBase] | None = None) -> Rewritten:
    """Rewrite a fresh model by the recipe in a directory, which the same chain of passes must have written."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        file = directory / _RECIPE
        recipe = json.loads(file.read_text(encoding="utf-8"))
        tensors = load_file(directory / _EXAMPLES)
    except (OSError, ValueError, SafetensorError) as error:
        raise RunError(f"{directory} does not hold a model that save_pretrained wrote: {error}") from error
    if not isinstance(recipe, dict) or recipe.get("fractrain_fx") != _FORMAT:
        wrote = recipe.get("fractrain_fx") if isinstance(recipe, dict) else None
        raise RunError(
            f"{file} is a recipe of schema {wrote}, and this version of the package reads {_FORMAT}: install the one "
            "that wrote it"
        )
    model = unwrapped(model)
    if recipe["architecture"] != type(model).__name__:
        raise RunError(f"{directory} holds a {recipe['architecture']}, but model= is a {type(model).__name__}")
    call = _unpack(recipe["example_inputs"], tensors)
    config = FracConfig.from_dict(recipe["config"])
    wrote = recipe.get("passes")
    if wrote != _names(passes):
        rewriter = "the default passes" if wrote is None else f"another chain ({', '.join(wrote)})"
        raise RunError(f"the model in {directory} was rewritten by {rewriter}: give from_pretrained the same passes=")
    return rewrite(model, record_model(model, config, call["args"], call["kwargs"]), config, passes)


def architecture_in(folder: Path) -> nn.Module:
    """A fresh model of the architecture that ``save_pretrained`` wrote into a folder."""
    try:
        recipe = json.loads((folder / _RECIPE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(
            f"{folder} holds neither a run (config.yaml) nor a model that save_pretrained wrote ({_RECIPE}): {error}"
        ) from error
    kind, name = str(recipe.get("architecture")), recipe.get("named")
    if name is not None:
        import timm

        sizes = {} if name.get("num_classes") is None else {"num_classes": name["num_classes"]}
        timm_model: nn.Module = timm.create_model(name["timm"], pretrained=False, **sizes)
        if type(timm_model).__name__ == kind:
            return timm_model
    file = folder / _CONFIG
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if "model_type" in config and kind in config.get("architectures", ()):
        import transformers

        if hasattr(transformers, kind):
            settings = transformers.AutoConfig.from_pretrained(folder)
            hf_model: nn.Module = getattr(transformers, kind)(settings)
            return hf_model
    raise RunError(
        f"{folder} holds a {kind}, which is neither timm's nor transformers': give its architecture: "
        "FracModel.from_pretrained(folder, model=...), or --model FILE.py:FUNCTION"
    )


def _names(passes: Sequence[PassBase] | None) -> list[str] | None:
    """The names of a chain of passes; ``None`` for the default one."""
    return None if passes is None else [type(pass_).__name__ for pass_ in passes]


def load_weights(model: Packable, directory: Path) -> None:
    """Load the weights that :func:`save` wrote into a rewritten model."""
    from safetensors import SafetensorError

    try:
        weights = read_weights(directory / _WEIGHTS)
        if (directory / _INSERTED).is_file():
            weights |= read_weights(directory / _INSERTED)
        if packed := {key.removesuffix(CODES) for key in weights if key.endswith(CODES)}:
            pack(model._state, packed)
        model.load_state_dict(weights)
    except (OSError, RuntimeError, SafetensorError) as error:
        kind = type(model._state.original).__name__
        raise RunError(f"the weights in {directory} cannot be loaded into {kind}: {error}") from error


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file that ``safetensors.torch.save_model`` wrote, under all of their names."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        # A tensor with several names is written once; the file says under which name.
        shared = {name: source for name, source in (file.metadata() or {}).items() if source in state}
    return state | {name: state[source] for name, source in shared.items()}


def _pack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Nested arguments as JSON; tensors go to ``tensors`` under a number."""
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().clone()
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": {str(key): _pack(item, tensors) for key, item in value.items()}}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_pack(item, tensors) for item in value]}
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
        return {key: _unpack(item, tensors) for key, item in content.items()}
    items = [_unpack(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items
