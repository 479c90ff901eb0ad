"""From settings to a trained model: names become a data set, a model and a Trainer."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from fractrain_fx.errors import RunError
from fractrain_fx.training.checkpoint import latest_checkpoint
from fractrain_fx.training.data import load_dataset
from fractrain_fx.training.models import BuiltModel, build_model
from fractrain_fx.training.settings import RunSettings
from fractrain_fx.training.trainer import Trainer

__all__ = ["build", "build_trainer", "free_folder", "new_run", "resume_run"]

_SETTINGS = "config.yaml"


def build(settings: RunSettings, *, own_sizes: bool = False) -> BuiltModel:
    """The data set and the model of ``settings``, with weights from its seed.

    Args:
        settings: of the run.
        own_sizes: leave the data set aside and keep the model's own classes and image size.

    Raises:
        FracTrainError: a name is unknown, or the model does not fit the data.
    """
    from accelerate.utils import set_seed

    set_seed(settings.train.seed)
    data = None if own_sizes else load_dataset(settings.data, block_length=settings.block_length)
    return build_model(settings.model, data, image_size=settings.image_size)


def build_trainer(
    settings: RunSettings, *, out: Path | None = None, label: str | None = None, console: Console | None = None
) -> Trainer:
    """Data set, model, ``fractrainify`` and Trainer for ``settings``.

    Raises:
        FracTrainError: a name is unknown, or a part does not fit the others.
    """
    from fractrain_fx.api import fractrainify

    built = build(settings)
    data = built.data if settings.limit is None else built.data.limited(settings.limit)
    args, kwargs = built.examples()
    model = fractrainify(built.model, config=settings.frac, example_inputs=args, example_kwargs=kwargs)
    return Trainer(model, data, settings.train, out=out, label=label, input_name=built.input_name, console=console)


def new_run(settings: RunSettings, out: Path, console: Console | None = None) -> Trainer:
    """A Trainer for a run that starts in ``out``.

    Raises:
        RunError: ``out`` already holds a run.
    """
    if latest_checkpoint(out) is not None:
        raise RunError(f"{out} already holds a run: go on with --resume {out}, or write to another folder")
    trainer = build_trainer(settings, out=out, console=console)
    if trainer.is_main:
        out.mkdir(parents=True, exist_ok=True)
        settings.to_yaml(out / _SETTINGS)
    return trainer


def resume_run(out: Path, console: Console | None = None) -> Trainer:
    """A Trainer that goes on where the run in ``out`` was after its last whole epoch.

    Raises:
        RunError: there is no run, or its checkpoint is damaged.
    """
    if not (out / _SETTINGS).is_file():
        raise RunError(f"{out} holds no run (no {_SETTINGS}): give the folder that fractrain train wrote to")
    trainer = build_trainer(RunSettings.from_yaml(out / _SETTINGS), out=out, console=console)
    trainer.resume()
    return trainer


def free_folder(settings: RunSettings, parent: Path = Path("runs")) -> Path:
    """A folder under ``parent`` that no run has, named for what is trained."""
    words = (settings.frac.method, settings.model.replace(":", "-"), settings.data)
    name = "-".join(Path(word).name for word in words)
    number = 1
    while (parent / f"{name}-{number}").exists():
        number += 1
    return parent / f"{name}-{number}"
