"""``fractrain export``: a trained model, from its folder alone, for other libraries."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fractrain_fx.errors import ConfigError, FracTrainError

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
    """The line that names how a run is deployed at its precision, or why no file holds it; empty for a float model."""
    config = model.frac_config
    if config.method == "float" or model._state.sharding is not None:  # the export reads whole weights
        return ""
    reason = ""
    for to in ("onnx",) if config.format == "affine" else ("compressed-tensors", "torchao"):
        try:
            _require_exportable(model, to)
        except FracTrainError as error:
            reason = str(error)
            continue
        fixed = " --commonest" if config.gated else ""  # no file holds choices by input
        return f"deploy it at this precision: fractrain export {run} --to {to}{fixed}"
    return f"no exported file holds this precision, and model.deployed() computes it here: {reason}"


def _require_exportable(model: FracModel, to: str) -> None:
    """Check that a format holds the precision of a trained model, with gates in each of their options that compute."""
    recording, config = model._state.recording, model.frac_config
    options = [number for number, option in enumerate(config.gate_options) if not option.skips]
    blocks = [block.name for block in model.blocks]
    for fixed in [dict.fromkeys(blocks, number) for number in options] if config.gated else [None]:
        model._request(to, fixed, [recording.args or recording.kwargs])


def _model_in(run: Path, name: str | None) -> tuple[FracModel, BuiltModel | None]:
    """The model of a folder, and the data of its run."""
    from fractrain_fx.training.run import can_resume, trained_model

    if can_resume(run):
        if name is not None:
            raise ConfigError(f"{run} is a run, which knows its model: leave out --model")
        return trained_model(run)
    from fractrain_fx.model import FracModel
    from fractrain_fx.model.saved.folder import architecture_in
    from fractrain_fx.training.models import build_model

    architecture = architecture_in(run) if name is None else build_model(name).model
    return FracModel.from_pretrained(run, model=architecture).eval(), None


def _batches(built: BuiltModel) -> list[Any]:
    """Some batches of test samples with labels, as the model takes them."""
    import torch

    from fractrain_fx.training.data import make_loader
    from fractrain_fx.training.data.loader import Share

    batches: list[Any] = []
    for inputs, targets in islice(make_loader(built.data, Share(_SIZE, 0, torch.device("cpu"))).test(), _BATCHES):
        if built.input_name is None:
            batches.append((inputs, targets))
        else:  # language models of transformers shift labels themselves
            labels = inputs if built.data.task == "language" else targets
            batches.append({built.input_name: inputs, "labels": labels})
    return batches
