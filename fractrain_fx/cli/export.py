"""``fractrain export``: a trained model, from its folder alone, for other libraries."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fractrain_fx.errors import ConfigError

if TYPE_CHECKING:
    from fractrain_fx.model import FracModel
    from fractrain_fx.training.models import BuiltModel

__all__ = ["deployment", "export"]

_BATCHES, _SIZE = 8, 64
_NUMBER = re.compile(r"-?\d+")


def export(arguments: dict[str, Any]) -> None:
    """Read a run or a saved model, write the files, and print what they are."""
    run, to, stage = Path(arguments["run"]), arguments["to"], arguments["stage"]
    model, built = _model_in(run, arguments["model"])
    options: dict[str, Any] = {name: True for name in ("fold_batch_norm", "fold_weights") if arguments[name]}
    if arguments["commonest"]:
        if built is None:
            raise ConfigError("--commonest counts choices on the test samples of a run, and this folder is not a run")
        options["choices"] = "commonest"
    if built is not None and (arguments["commonest"] or to == "compressed-tensors"):
        options["batches"] = _batches(built)
    if stage is not None:
        options["stage"] = int(stage) if _NUMBER.fullmatch(stage) else stage
    out = run / f"export-{to}" if arguments["out"] is None else Path(arguments["out"])
    print(model.export(out, format=to, levels=arguments["levels"], **options))


def deployment(run: Path, model: FracModel) -> str:
    """The line that names how a run is deployed at its precision; empty for a float model."""
    from fractrain_fx.capture.inputs.examples_hf import is_hugging_face

    config = model.frac_config
    if config.method == "float":
        return ""
    if config.format == "affine":
        to = "onnx" if config.affine.ranges == "tensor" else None
    elif config.format in ("fp8", "mx", "nvfp4"):
        convolves = any(op.kind.startswith("conv") and op.precision.rounds for op in model.ops)
        to = "compressed-tensors" if is_hugging_face(model._state.original) else None if convolves else "torchao"
    else:
        to = None
    if to is None:
        return "no exported file holds this precision: model.deployed() computes it here"
    fixed = " --commonest" if config.gated else ""  # no file holds choices by input
    return f"deploy it at this precision: fractrain export {run} --to {to}{fixed}"


def _model_in(run: Path, name: str | None) -> tuple[FracModel, BuiltModel | None]:
    """The model of a folder, and the data of its run."""
    from fractrain_fx.training.run import can_resume, trained_model

    if can_resume(run):
        if name is not None:
            raise ConfigError(f"{run} is a run, which knows its model: leave out --model")
        return trained_model(run)
    from fractrain_fx.model import FracModel
    from fractrain_fx.model.saved.named import architecture_in
    from fractrain_fx.training.models import build_model

    made = architecture_in(run) if name is None else build_model(name).model
    return FracModel.from_pretrained(run, model=made).eval(), None


def _batches(built: BuiltModel) -> list[Any]:
    """Some batches of test samples with labels, as the model takes them."""
    import torch

    from fractrain_fx.training.data import make_loader
    from fractrain_fx.training.data.loader import Share

    found: list[Any] = []
    for inputs, targets in islice(make_loader(built.data, Share(_SIZE, 0, torch.device("cpu"))).test(), _BATCHES):
        if built.input_name is None:
            found.append((inputs, targets))
        else:  # language models of transformers shift labels themselves
            labels = inputs if built.data.task == "language" else targets
            found.append({built.input_name: inputs, "labels": labels})
    return found
