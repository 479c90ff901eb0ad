"""Lines of a user's code: where a call comes from, where an error was raised; and warnings that name them."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from itertools import takewhile
from types import CodeType, FrameType
from typing import Any

from torch import nn

from fractrain_fx.errors import FracTrainWarning

__all__ = [
    "CAPTURE",
    "PACKAGE",
    "around",
    "by_capture",
    "by_library",
    "call_place",
    "error_line",
    "forward_code",
    "forward_line",
    "forward_of",
    "in_words",
    "is_foreign",
    "is_within",
    "listed",
    "model_line",
    "of_models",
    "outside_capture",
    "outward",
    "package_of",
    "source_line",
    "users_frame",
    "warn",
]

CAPTURE = __name__.rpartition(".")[0]
"""The package of capture, by which its own functions and frames are recognised."""

PACKAGE = __name__.partition(".")[0]
"""The name of this package."""

_FOREIGN = frozenset({*sys.stdlib_module_names, "torch", "numpy", PACKAGE} - {"__main__"})
_RUNS = f"{CAPTURE}.attempts"  # which calls the model


def source_line() -> str | None:
    """File and line of the innermost code outside of torch and this package, as ``train.py:42``."""
    frame = users_frame()
    return None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def users_frame() -> FrameType | None:
    """The innermost frame outside torch and this package."""
    return next((frame for frame in outward(sys._getframe(1)) if not by_library(frame)), None)


def model_line() -> str | None:
    """File and line of the innermost code of the model that is being recorded; ``None`` if all of it is torch's."""
    for frame in outward(sys._getframe(1)):
        if of_models(frame):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if _module_of(frame).startswith(f"{PACKAGE}.") and not by_capture(frame):
            return None  # what called capture is not the model
    return None


def call_place() -> int:
    """A number for the calls of Python code that lead from the recorded model to the present one.

    Two calls on one line, and two passes through one function, have different numbers; repetitions of a loop have one.
    """
    frames = takewhile(lambda frame: _module_of(frame) != _RUNS, outward(sys._getframe(1)))
    calls = [(frame.f_code, frame.f_lasti) for frame in frames if not by_capture(frame)]
    return hash(tuple((code.co_filename, code.co_firstlineno, last) for code, last in calls))


def outward(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame, the one that called it, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def outside_capture(frame: FrameType) -> FrameType:
    """The innermost frame of code that is not capture's own, from this one outward."""
    return next((outer for outer in outward(frame) if not by_capture(outer)), frame)


def package_of(frame: FrameType) -> str:
    """The package that code belongs to, such as ``numpy``."""
    return _module_of(frame).partition(".")[0]


def is_foreign(module: str) -> bool:
    """Whether a module of Python belongs to Python itself, torch, numpy or this package, and not to a user."""
    return module.partition(".")[0] in _FOREIGN


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def by_capture(frame: FrameType) -> bool:
    """Whether code is capture's own."""
    return _module_of(frame).startswith(f"{CAPTURE}.")


def of_models(frame: FrameType) -> bool:
    """Whether code is a model's: neither torch's nor this package's, but for the models of its zoo."""
    return not by_library(frame) or _module_of(frame).startswith(f"{PACKAGE}.zoo.")


def error_line(error: BaseException) -> str:
    """File and line of the innermost code outside of torch and this package through which an error went; or empty."""
    line, trace = "", error.__traceback__
    while trace is not None:
        if of_models(trace.tb_frame):
            line = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line


def forward_of(kind: type) -> Any:
    """The forward of a class of modules; ``None`` for TorchScript, whose classes raise an error for the name."""
    forward = getattr(kind, "forward", None)
    return None if forward is None else inspect.unwrap(forward)


def forward_code(module: nn.Module) -> CodeType | None:
    """The code of the forward of a module's class; ``None`` if it is not written in Python."""
    return getattr(forward_of(type(module)), "__code__", None)


def forward_line(module: nn.Module) -> str:
    """File and line at which the forward of a module's class begins; empty for classes of torch."""
    kind, code = type(module), forward_code(module)
    return "" if code is None or kind.__module__.startswith("torch.") else f"{code.co_filename}:{code.co_firstlineno}"


def in_words(module: nn.Module) -> str:
    """A module's class, with the line of its forward."""
    line = forward_line(module)
    return f"{type(module).__name__} ({line})" if line else type(module).__name__


def by_library(frame: FrameType) -> bool:
    """Whether code is torch's or this package's own, whose ways a graph does not depend on."""
    return _is_library(_module_of(frame))


def is_within(path: str, others: Collection[str]) -> bool:
    """Whether the path of a module is one of the others, or below one."""
    parts = path.split(".")
    return any(".".join(parts[: i + 1]) in others for i in range(len(parts)))


def around(paths: Iterable[str]) -> str:
    """The innermost module around some modules, by path."""
    names = zip(*(path.split(".") for path in paths), strict=False)
    return ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, names))


def listed(words: Iterable[str], most: int = 3, mark: str = ", ") -> str:
    """The first few of several words or phrases, and the number of the others."""
    phrases = list(words)
    rest = [f"and {len(phrases) - most} more"] if len(phrases) > most else []
    return mark.join([*phrases[:most], *rest])


@lru_cache(maxsize=4096)
def _is_library(name: str) -> bool:
    return name.partition(".")[0] in ("torch", PACKAGE)


def warn(words: str, at: FrameType | None = None, category: type[Warning] = FracTrainWarning) -> None:
    """Warn at a frame, by default the innermost one outside torch and this package."""
    at = at or users_frame()
    if at is None:
        warnings.warn(words, category, stacklevel=2)
    else:
        warnings.warn_explicit(words, category, at.f_code.co_filename, at.f_lineno)
