"""``fractrain sensitivity``: the sensitivities of a trained run, and an allocation of them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from fractrain_fx.config import FracConfig, PrecisionStages
from fractrain_fx.durable import require_file
from fractrain_fx.errors import ConfigError
from fractrain_fx.numerics.allocation import Allocation, StagedAllocation, allocate
from fractrain_fx.numerics.allocation.allocation import FILE as ALLOCATION
from fractrain_fx.numerics.sensitivity import Sensitivities, sensitivity
from fractrain_fx.numerics.sensitivity.result import FILE
from fractrain_fx.numerics.trainers import layer_precisions
from fractrain_fx.training.data.loader import Share, by_name, make_loader
from fractrain_fx.training.log import new_console
from fractrain_fx.training.objective import Objective
from fractrain_fx.training.run import settings_in, trained_model
from fractrain_fx.training.settings import RunSettings, flat_name

__all__ = ["measure_run", "show_sensitivity"]

# The flags that need --budget: what each does, and a budget that suits it.
_WITH_BUDGET = {
    "allocation": ("writes the widths", "FW-4/BW-6"),
    "write": ("chooses layers", "FW-10/BW-10"),
    "stages": ("is for the widths", "FW-4/BW-6"),
}


# Settings that a run at the chosen widths does not take over.
_OF_ONE_RUN = {"recipe", "epochs", "iterations", "epoch_steps", "subset", "test_subset", "gate_lr", "gate_lr_factor"}


def show_sensitivity(arguments: dict[str, Any]) -> None:
    """Measure a run, or read what was measured, and print and write what the flags ask for."""
    source, budget = Path(arguments["run"]), arguments["budget"]
    for flag, (purpose, example) in _WITH_BUDGET.items():
        if arguments[flag] is not None and budget is None:
            raise ConfigError(f"--{flag} {purpose} under a budget: add --budget {example}, or leave it out")
    for flag in ("out", "draw", "allocation"):
        if arguments[flag] is not None:
            require_file(Path(arguments[flag]))
    if arguments["write"] is not None:
        require_file(Path(arguments["write"][1]))
    if source.suffix == ".json":
        if arguments["batches"] is not None:
            raise ConfigError(f"{source} was measured before, so that --batches changes nothing: leave it out")
        sensitivities = Sensitivities.from_json(source)
    else:
        batches = 8 if arguments["batches"] is None else arguments["batches"]
        if batches < 1:
            raise ConfigError(f"--batches {batches} must be at least 1: the training batches to measure on")
        sensitivities = measure_run(source, batches)
        sensitivities.to_json(source / FILE)
    console = new_console()
    console.print(sensitivities)
    if arguments["out"] is not None:
        sensitivities.to_json(arguments["out"])
    if arguments["draw"] is not None:
        sensitivities.to_svg(arguments["draw"])
    if budget is not None:
        chosen = _allocated(sensitivities, budget, arguments["stages"])
        console.print(chosen)
        run = _trained_as(source) if source.is_dir() else {}
        if source.is_dir():
            chosen.to_yaml(source / ALLOCATION, run)
        if arguments["allocation"] is not None:
            chosen.to_yaml(arguments["allocation"], run)
        if arguments["write"] is not None:
            trainer, path = arguments["write"]
            layers = layer_precisions(sensitivities, _budget(budget), trainer)
            console.print(str(layers))
            layers.write(path)


def measure_run(folder: Path, batches: int) -> Sensitivities:
    """The sensitivities of a run's model after its last whole epoch, on batches of its training data.

    The run is only read, so it may train meanwhile.

    Raises:
        RunError: there is no run in the folder, or it has no checkpoint yet.
        InputError: there are too few batches.
    """
    model, built = trained_model(folder)
    loop = settings_in(folder).train
    device = _device(loop.device)
    loader = make_loader(built.data, Share(loop.batch_size, loop.seed, device))
    held = by_name(loader.train(0, batches), built.input_name)
    return sensitivity(model.to(device), held, criterion=Objective.of(built.data).criterion, limit=batches)


def _trained_as(folder: Path) -> dict[str, Any]:
    """What a run trains on what, and how, apart from its length and method, where that is not the default."""
    usual = RunSettings().to_dict()
    others = _OF_ONE_RUN | {flat_name(FracConfig, field.name) for field in fields(FracConfig)}
    values = settings_in(folder).to_dict().items()
    return {key: value for key, value in values if key not in others and value != usual[key]}


def _device(name: str) -> torch.device:
    """The device that a run's settings name; the CPU if this machine does not have it."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator if accelerator is not None and name in ("auto", accelerator.type) else torch.device("cpu")


def _allocated(sensitivities: Sensitivities, text: str, stages: int | None) -> Allocation | StagedAllocation:
    """The widths under a budget: a number, or the price of a precision or of stages."""
    if "(" in text:
        precisions = PrecisionStages.parse(text)
        return allocate(sensitivities, precisions, stages=len(precisions.stages) if stages is None else stages)
    budget = _budget(text)
    return allocate(sensitivities, budget) if stages is None else allocate(sensitivities, budget, stages=stages)


def _budget(text: str) -> float | str:
    """A number as such, and all else as a precision."""
    try:
        return float(text)
    except ValueError:
        return text
