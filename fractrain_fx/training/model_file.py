"""A user's file of models: the function in it, and its errors in one line."""

from __future__ import annotations

import importlib.util
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fractrain_fx.errors import FracTrainError, ModelError, near

__all__ = ["MODEL_FORMS", "function_of", "own_code"]

MODEL_FORMS = "write timm:NAME, hf:TYPE, zoo:NAME or FILE.py:FUNCTION"


def function_of(path: Path, function: str) -> Callable[..., Any]:
    """The function of a Python file.

    Raises:
        ModelError: there is no such file or function.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ModelError(f"{path.absolute()} is not a file: {MODEL_FORMS}")
    if not function:
        raise ModelError(f"model '{path}:' does not say which function builds it: write {path}:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    build = getattr(module, function, None)
    if not callable(build):
        raise ModelError(f"{path} has no function {function!r}.{near(function, vars(module))}")
    found: Callable[..., Any] = build
    return found


@contextmanager
def own_code(path: Path, name: str) -> Iterator[None]:
    """Turn an error of the user's code into a ``ModelError`` of one line, whose cause is that error.

    Args:
        path: the user's file, in which the error is located.
        name: of the model.
    """
    try:
        yield
    except FracTrainError:
        raise
    except Exception as error:
        file, frames = str(path.absolute()), traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == file]
        where = f" in line {lines[-1]}" if lines else ""
        text = " ".join(str(error).split())
        raise ModelError(f"{name} failed{where}: {type(error).__name__}: {text}") from error
