"""The interface of a model that the engine needs, and the levels of its method's stages."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from fractrain_fx.config import FracConfig
from fractrain_fx.config.precision import FULL, Precision
from fractrain_fx.engine.schedules import Level
from fractrain_fx.errors import ConfigError, InputError
from fractrain_fx.nn.cost import Forward

if TYPE_CHECKING:
    from fractrain_fx.engine.course import SteeredRun

__all__ = [
    "SteeredModel",
    "apply_level",
    "is_steered",
    "level_text",
    "levels_of",
    "note_steered",
    "noted_run",
    "show_level",
    "steered_model",
    "target_of",
]

_STEERED: WeakKeyDictionary[Any, SteeredRun | None] = WeakKeyDictionary()
_TARGET = re.compile(r"cp (\S+) %")


class SteeredModel(Protocol):
    """The interface of a model that the engine needs; ``FracModel`` has it.

    ``training_forward`` is the last forward that trains, whatever ran after it; once ``count_forward`` has given it to
    its loss, the last forward. ``targets`` are in per cent, one for each stage; ``uncounted`` is the number of
    contractions that no formula counts. ``macs`` are forward MACs of one sample of the example's sizes, and
    ``training_macs`` those of training on it with nothing frozen; ``gated_share`` the share of cp that is of gated ops.
    """

    @property
    def frac_config(self) -> FracConfig: ...
    @property
    def training_forward(self) -> Forward: ...
    def count_forward(self) -> Forward: ...
    @property
    def macs(self) -> int: ...
    @property
    def uncounted(self) -> int: ...
    @property
    def training_macs(self) -> int: ...
    @property
    def gated_share(self) -> float: ...
    @property
    def targets(self) -> tuple[float, ...]: ...
    def set_precision(self, precision: Precision, /) -> object: ...
    def set_target(self, target: float, /) -> object: ...
    def look_for_changes(self) -> object: ...


def levels_of(model: SteeredModel) -> tuple[Level, ...]:
    """The levels of the stages of the model's method."""
    config = model.frac_config
    if config.scheduled:
        return config.precision_stages
    if not config.gated:
        return (FULL,)
    return model.targets if config.method == "fractrain" else model.targets[-1:]


def target_of(level: Level) -> float:
    """The target cp, in per cent, of a stage of a gated model."""
    if isinstance(level, Precision):
        raise ConfigError(f"a gated model is steered by target cp, its schedule gave {level}")
    return level


def apply_level(model: SteeredModel, level: Level) -> None:
    """Give a model the level of a stage."""
    if model.frac_config.scheduled and isinstance(level, Precision):
        model.set_precision(level)
    elif model.frac_config.gated:
        model.set_target(target_of(level))


def level_text(level: Level) -> str:
    """A level as files keep it: ``FW-3/BW-6``, ``float``, ``cp 1.5 %``."""
    if isinstance(level, Precision):
        return "float" if level.is_float else str(level)
    return f"cp {level:g} %"


def show_level(level: Level | str) -> str:
    """A level, or its text from a file, as people read it: a target has two decimals, ``cp 1.50 %``."""
    text = level if isinstance(level, str) else level_text(level)
    target = _TARGET.fullmatch(text)
    return text if target is None else f"cp {float(target[1]):.2f} %"


def steered_model(model: Any, asked_by: str = "Engine") -> SteeredModel:
    """The rewritten model itself, or inside its wrappers; without one, the error names who asked.

    Wrappers are ``torch.compile`` (``_orig_mod``), data-parallel ones (``module``), and the model that transformers'
    Trainer shows (``_frac_model``).
    """
    while not hasattr(type(model), "set_precision"):
        inner = getattr(model, "__dict__", {}).get("_frac_model")
        inner = inner or getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if inner is None:
            raise InputError(
                f"{asked_by} needs a model made by fractrainify, got {type(model).__name__}: "
                f"write {asked_by}(fractrainify(model))"
            )
        model = inner
    steered: SteeredModel = model
    return steered


def note_steered(model: SteeredModel, run: SteeredRun | None = None) -> None:
    """Note that an engine was made for a model, or is made when training begins.

    ``run`` has the engine's course and ledger, which hold no reference to the model.
    """
    _STEERED[model] = run


def noted_run(model: Any) -> SteeredRun | None:
    """The training of a model by the engine that was made last for it; ``None`` if there was none."""
    return _STEERED.get(model)


def is_steered(model: Any) -> bool:
    """Whether an engine was made for a model."""
    return model in _STEERED
