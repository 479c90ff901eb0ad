"""One family of errors. A message says what is wrong, where, and what to do about it."""

__all__ = [
    "CalibrationError",
    "CaptureError",
    "ConfigError",
    "CostTermError",
    "DataError",
    "ExportError",
    "FracTrainError",
    "FracTrainWarning",
    "InputError",
    "MissingPackageError",
    "ModelError",
    "NonFiniteLossError",
    "PassError",
    "RuleError",
    "RunError",
    "TargetError",
    "near",
    "next_sentence",
    "require_known",
    "require_packages",
]

import importlib.util
from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class FracTrainError(Exception):
    """Base of every error that this package raises for something that a user can fix."""

    # In Python, because torch 2.11's compiler shows no message of an error that it finds where `__str__` is C code.
    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class FracTrainWarning(UserWarning):
    """The code does not do what it seems to do: an attribute without effect, a call that runs the float original."""


class ConfigError(FracTrainError, ValueError):
    """A setting or an option has a value without a meaning, or does not fit the others."""


class TargetError(ConfigError):
    """A cost target lies outside what the precision options of this model can reach."""


class RuleError(ConfigError):
    """A precision rule matches no contraction of the model."""


class CaptureError(FracTrainError):
    """A model could not be recorded as a graph that equals it."""


class InputError(FracTrainError, TypeError):
    """An argument is of the wrong kind, a call does not fit the recording, or no example inputs can be found."""


class PassError(FracTrainError):
    """A graph does not meet what a pass requires, or what it ensures."""


class ModelError(FracTrainError, ValueError):
    """A model is unknown, has nothing to quantize or to gate, or is no longer as it was rewritten."""


class CalibrationError(FracTrainError, RuntimeError):
    """A model was evaluated before its activation ranges were seen."""


class CostTermError(FracTrainError, RuntimeError):
    """A training loop leaves the cost term out of the loss, so that the gates never learn the cost."""


class DataError(FracTrainError, ValueError):
    """A data set is unknown, missing or malformed."""


class RunError(FracTrainError, RuntimeError):
    """A run cannot go on: files missing or damaged, another configuration, calls in a wrong order, a lost process."""


class ExportError(FracTrainError, ValueError):
    """A trained precision has no form in the format asked for, or in any: the message has the way out."""


class MissingPackageError(FracTrainError, ImportError):
    """A package that this needs is not installed; the message has the command that installs it."""


class NonFiniteLossError(FracTrainError, ArithmeticError):
    """A loss is NaN or infinite."""


def near(word: str, known: Iterable[str], count: int = 3) -> str:
    """Words like ``word`` among ``known`` as a phrase for an error message, or an empty string."""
    matches = get_close_matches(word, list(known), n=count, cutoff=0.5)
    return f" Did you mean {' or '.join(repr(match) for match in matches)}?" if matches else ""


def next_sentence(told: str | None) -> str:
    """A finding as a sentence behind a message; empty for ``None``."""
    return "" if told is None else f". {told[0].upper()}{told[1:]}"


def require_known(what: str, options: Iterable[str], known: Sequence[str]) -> None:
    """Check the names of options that are passed on.

    Args:
        what: the function that takes them.
        options: the names given.
        known: the names that it has.

    Raises:
        ConfigError: it has no such option.
    """
    for name in options:
        if name not in known:
            raise ConfigError(f"{what} has no option {name!r}: {', '.join(known)}.{near(name, known)}")


EXTRAS = {
    "train": ("accelerate", "filelock", "sklearn"),
    "draw": ("graphviz",),
    "report": ("altair", "jinja2", "vl_convert"),
    "lightning": ("lightning",),
    "allocate": ("scipy",),
    "export": ("compressed_tensors", "onnx", "onnxscript", "onnxruntime", "torchao"),
}
"""The packages that only some users need, as they are imported, by the extra of ``pyproject.toml`` that has them."""

DISTRIBUTIONS = {
    "sklearn": "scikit-learn",
    "vl_convert": "vl-convert-python",
    "compressed_tensors": "compressed-tensors",
}
"""Their names on the package index, where pip knows them by others than Python."""


def require_packages(what: str, extra: str) -> None:
    """Check that the packages of an extra are installed, all at once, before the first is imported.

    Args:
        what: what needs them, for the message.
        extra: the extra.

    Raises:
        MissingPackageError: one is not; the message has the command that installs it.
    """
    missing = [DISTRIBUTIONS.get(name, name) for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackageError(f"{what} needs {' and '.join(missing)}: pip install 'fractrain_fx[{extra}]'")
