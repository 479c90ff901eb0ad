"""Build a data set, a model and a Trainer from settings."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from torch import Tensor

from fractrain_fx.engine.distributed import is_first, on_first
from fractrain_fx.errors import DataError, RunError
from fractrain_fx.model import FracModel
from fractrain_fx.training.building import prepare_rounding
from fractrain_fx.training.data import DataSet, draw_subset, load_dataset, phases_of
from fractrain_fx.training.folder.checkpoint import latest_checkpoint, newest_checkpoint
from fractrain_fx.training.folder.held import HeldFolder, hold, hold_new, hold_together, holds_run, set_aside
from fractrain_fx.training.log import new_console
from fractrain_fx.training.log.records import SETTINGS, STARTS
from fractrain_fx.training.models import BuiltModel, build_model
from fractrain_fx.training.objective import check_outputs
from fractrain_fx.training.processes import make_accelerator, seed_all
from fractrain_fx.training.settings import RunSettings
from fractrain_fx.training.trainer import Trainer

__all__ = ["build", "build_trainer", "can_resume", "hold_folder", "new_run", "resume_run"]
__all__ += ["settings_in", "trained_model"]

_PRETRAINING = "pretrain"
_RUNS = Path("runs")


def build(settings: RunSettings, *, own_sizes: bool = False, pretraining: bool = False) -> BuiltModel:
    """The data set and the model of ``settings``, with weights from its seed.

    Args:
        settings: settings of the run.
        own_sizes: ignore the data set, and keep the model's own classes and image size.
        pretraining: take the samples of the first phase, for settings with two.

    Raises:
        FracTrainError: a name is unknown, or the model does not fit the data.
    """
    data = None if own_sizes else _load(settings, pretraining)
    seed_all(settings.train.seed)
    return build_model(settings.model, data, image_size=settings.image_size)


def _load(settings: RunSettings, pretraining: bool) -> DataSet:
    data = load_dataset(settings.data, data_dir=settings.data_dir, block_length=settings.block_length)
    data = data.augmented(settings.augment)
    test = settings.subset if settings.test_subset is None else settings.test_subset
    data = draw_subset(data, settings.subset, test, settings.split_seed)
    if settings.setting == "standard":
        return data
    data = phases_of(data, settings.setting, settings.split_seed)[0 if pretraining else 1]
    if len(data.train) < 2:  # batch normalisation needs two
        raise DataError(
            f"setting={settings.setting!r} leaves one training sample for a phase: write a larger subset than "
            f"{settings.subset}"
        )
    return data


def build_trainer(
    settings: RunSettings, *, out: Path | None = None, label: str | None = None, console: Console | None = None
) -> Trainer:
    """Data set, model, ``fractrainify`` and Trainer for ``settings``.

    If the setting has a phase of pre-training, it is trained first (or finished, if ``out`` has a part of it), and the
    Trainer starts from its weights. The settings of both phases are checked before.

    Raises:
        FracTrainError: a name is unknown, or a part does not fit the others.
    """
    if settings.setting == "standard":
        return _trainer(settings, out, label, console)
    settings = _chosen(settings, _trainer(settings, None, label, console).model)
    return _trainer(settings, out, label, console, weights=_pretrained(settings, out, console))


def _trainer(
    settings: RunSettings,
    out: Path | None,
    label: str | None,
    console: Console | None,
    *,
    weights: dict[str, Tensor] | None = None,
    pretraining: bool = False,
) -> Trainer:
    from fractrain_fx.api import fractrainify

    built = build(settings, pretraining=pretraining)
    if weights is not None:
        built.model.load_state_dict(weights)
    args, kwargs = built.examples()
    check_outputs(settings.model, built)
    config = prepare_rounding(settings, built, console or new_console())
    model = fractrainify(built.model, config=config, example_inputs=args, example_kwargs=kwargs)
    return Trainer(
        model,
        built.data,
        settings.train,
        out=out,
        label=label,
        input_name=built.input_name,
        console=console,
        config=_chosen(settings, model).to_dict(),
    )


def _pretrained(settings: RunSettings, out: Path | None, console: Console | None) -> dict[str, Tensor]:
    """The weights after the float pre-training on the first part of the data (supplement, section 5)."""
    folder = None if out is None else out / _PRETRAINING
    trainer = _trainer(settings.pretraining, folder, "pre-training in float", console, pretraining=True)
    if out is not None and folder is not None:
        _keep_settings(settings, out)
        if latest_checkpoint(folder) is not None:
            trainer.resume()
    trainer.fit()
    return {name: value.detach().cpu().clone() for name, value in trainer.model.restore().state_dict().items()}


def hold_folder(settings: RunSettings, out: Path | None = None) -> HeldFolder:
    """The folder of a run that starts, which no other process writes to until it is released.

    Args:
        settings: settings of the run.
        out: the folder; by default a new one under ``runs/``, named for method, model and data.

    Raises:
        RunError: ``out`` already holds a run, another process writes to it, or it cannot be written to.
    """
    return _hold(settings, lambda: hold_new(_RUNS, _name(settings)) if out is None else _hold_unused(out))


def _hold(settings: RunSettings, take: Callable[[], HeldFolder]) -> HeldFolder:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        make_accelerator(settings.train)  # opens the group of processes, which agree on the folder
    return hold_together(take)


def new_run(settings: RunSettings, out: Path | HeldFolder | None = None, console: Console | None = None) -> Trainer:
    """A Trainer for a run that starts in ``out``, and can be resumed from any folder.

    The folder is held until the Trainer has trained. The settings are written after everything was checked.

    Raises:
        RunError: as :func:`hold_folder`, which takes a path (or none) as ``out``.
    """
    settings = _anywhere(settings)
    held = out if isinstance(out, HeldFolder) else hold_folder(settings, out)
    try:
        trainer = build_trainer(settings, out=held.path, console=console)
        _keep_settings(_chosen(settings, trainer.model), held.path)
    except BaseException:
        held.discard()
        raise
    trainer.held = held
    return trainer


def _hold_unused(out: Path) -> HeldFolder:
    held = hold(out)
    for folder in (out, out / _PRETRAINING):
        if holds_run(folder):
            held.release()
            raise RunError(f"{out} already holds a run: continue with --resume {out}, or write to another folder")
    (out / STARTS).unlink(missing_ok=True)  # of a run that was stopped before its first checkpoint
    return held


def _anywhere(settings: RunSettings) -> RunSettings:
    """The settings with absolute paths of the model's file and of the data set's folder."""
    source, colon, function = settings.model.rpartition(":")
    model = f"{Path(source).absolute()}{colon}{function}" if source.endswith(".py") else settings.model
    folder = settings.data_dir
    return replace(
        settings, model=model, data_dir=None if folder is None else str(Path(folder).expanduser().absolute())
    )


def resume_run(out: Path, console: Console | None = None) -> Trainer:
    """A Trainer that continues the run in ``out`` after its last whole epoch.

    A run without a checkpoint (it was stopped before the first one, or all were lost) starts anew and says so; results
    from before are kept under other names.

    Raises:
        RunError: there is no run, or its checkpoint is damaged or has another configuration.
    """
    held = _hold(settings_in(out), lambda: hold(out))
    try:
        trainer = _resumed(out, console)
    except BaseException:
        held.release()
        raise
    trainer.held = held
    return trainer


def _resumed(out: Path, console: Console | None) -> Trainer:
    settings = settings_in(out)
    if latest_checkpoint(out) is not None:
        trainer = _trainer(settings, out, None, console)
        trainer.resume()
        return trainer
    aside = on_first(lambda: _set_aside(out))
    if is_first():
        where = f"; the results so far are in {', '.join(aside)}" if aside else ""
        text = f"{out} has no checkpoint, so the run starts anew{where}"
        (console or new_console()).print(text, highlight=False, markup=False, soft_wrap=True)
    trainer = build_trainer(settings, out=out, console=console)
    _keep_settings(_chosen(settings, trainer.model), out)
    return trainer


def trained_model(out: Path) -> tuple[FracModel, BuiltModel]:
    """The model of a run as it is after its last whole epoch, in evaluation mode, and its data.

    Raises:
        RunError: there is no run, or it has no checkpoint, or that is damaged, of another model or of a newer version.
    """
    from fractrain_fx.api import fractrainify

    settings = settings_in(out)
    checkpoint = newest_checkpoint(out)
    built = build(settings)
    args, kwargs = built.examples()
    model = fractrainify(built.model, config=settings.frac, example_inputs=args, example_kwargs=kwargs)
    checkpoint.fill(model)
    return model.eval(), built


def _set_aside(out: Path) -> list[str]:
    """Rename the results of phases without a checkpoint, so that the new run does not replace them."""
    phases = [folder for folder in (out, out / _PRETRAINING) if latest_checkpoint(folder) is None]
    return [str(file.relative_to(out)) for folder in phases for file in set_aside(folder)]


def can_resume(out: Path) -> bool:
    """Whether ``out`` is the folder of a run."""
    return (out / SETTINGS).is_file()


def settings_in(out: Path) -> RunSettings:
    """The settings of the run in ``out``.

    Raises:
        RunError: there is no run.
    """
    if not can_resume(out):
        raise RunError(f"{out} holds no run (no {SETTINGS}): give the folder that fractrain train wrote to")
    return RunSettings.from_yaml(out / SETTINGS)


def _chosen(settings: RunSettings, model: FracModel) -> RunSettings:
    """The settings with the ``backend`` that was chosen, so that a resumed run rounds as before."""
    return replace(settings, frac=settings.frac.replace(**{"run.backend": model.frac_config.run.backend}))


def _keep_settings(settings: RunSettings, out: Path) -> None:
    if is_first():
        settings.to_yaml(out / SETTINGS)


def _name(settings: RunSettings) -> str:
    """The name of a run: its method, number format and pins if it has others than the usual, model and data."""
    frac, model = settings.frac, settings.model.replace(":", "-")
    words = (frac.method, settings.number_format, "pinned" if frac.pins else "", model, settings.data)
    return "-".join(Path(word).name for word in words if word)
