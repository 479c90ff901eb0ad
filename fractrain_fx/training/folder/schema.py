"""What the files of a checkpoint hold, and the check that they do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from fractrain_fx.errors import FracTrainError, RunError

__all__ = ["MODEL", "STATE", "SUMS", "TENSORS", "VERSION", "Optional", "reading", "require_form"]

MODEL, TENSORS, STATE, SUMS = "model.safetensors", "training.pt", "state.json", "sha256.json"

VERSION = 1
"""The version of the schema: docs/reference/run-folder.md says where a checkpoint keeps ranges, bits and pins."""

_DAMAGE = (OSError, EOFError, LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError)


class Optional:
    """A form, or nothing: ``None``, or no entry at all.

    Args:
        form: as in :func:`require_form`.
    """

    def __init__(self, form: Any) -> None:
        self.form = form


_NUMBER = (int, float)
_LEDGER = {"macs": int, "epochs": [{"epoch": int, "stage": int, "level": str, "options": dict}]}
_ENGINE = {"stage": int, "schedule": dict, "ledger": _LEDGER, "cost_term": dict, "clock": dict}
_BEST = {"value": _NUMBER, "epoch": int, "macs": _NUMBER}
_RANDOM = {"torch": Tensor, "device": Optional(Tensor), "python": tuple, "numpy": tuple}

FORMS: dict[str, Any] = {
    SUMS: {name: str for name in (MODEL, TENSORS, STATE)},
    STATE: {
        "version": int,
        "epoch": int,
        "config": dict,
        "state": {"engine": _ENGINE, "seconds": _NUMBER, "value": Optional(_NUMBER), "best": Optional(_BEST)},
    },
    TENSORS: {
        "optimizer": {"state": dict, "param_groups": list},
        "scheduler": {"last_epoch": int, "_last_lr": list},
        "scaler": Optional(dict),
        "random": [_RANDOM],
    },
}
"""The content of each file; entries that are not named here may be there too."""


def require_form(file: str, content: Any) -> None:
    """Check the content of a file of a checkpoint.

    Raises:
        ValueError: an entry is missing, or of another kind; the message names file and entry.
    """
    _require(content, FORMS[file], file)


def _require(value: Any, form: Any, place: str) -> None:
    if isinstance(form, Optional):
        if value is None:
            return
        form = form.form
    if isinstance(form, dict):
        _require(value, dict, place)
        for name, inner in form.items():
            if name not in value and not isinstance(inner, Optional):
                raise ValueError(f"{place} has no entry {name!r}")
            _require(value.get(name), inner, f"{place}: {name}")
    elif isinstance(form, list):
        _require(value, list, place)
        for number, item in enumerate(value):
            _require(item, form[0], f"{place}[{number}]")
    elif not isinstance(value, form) or isinstance(value, bool):
        kinds = form if isinstance(form, tuple) else (form,)
        raise ValueError(f"{place} is {type(value).__name__} and not {' or '.join(kind.__name__ for kind in kinds)}")


@contextmanager
def reading(place: Path) -> Iterator[None]:
    """Explain what fails inside while a file or folder of a run is read or its content is used.

    Raises:
        RunError: the content is not that of a run's file.
    """
    try:
        yield
    except FracTrainError:
        raise
    except _DAMAGE as error:
        reason = f"no entry {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise RunError(f"{place} is damaged ({reason}): restore it from a copy, or start the run again") from error
