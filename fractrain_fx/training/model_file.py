"""A user's file of models: the function in it, and its errors in one line."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fractrain_fx.errors import FracTrainError, ModelError, near

__all__ = ["MODEL_FORMS", "function_of", "own_code"]

MODEL_FORMS = "write timm:NAME, hf:TYPE, zoo:NAME or FILE.py:FUNCTION"


def function_of(path: Path, function: str) -> Callable[..., Any]:
    """The function of a Python file, which is run as ``python FILE.py`` would: it may import files beside it.

    Raises:
        ModelError: there is no such file or function.
    """
    name = f"_model_file_{path.stem}"  # of its own, because an installed module may have the file's name
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ModelError(f"{path.absolute()} is not a file: {MODEL_FORMS}")
    if not function:
        raise ModelError(f"model '{path}:' does not say which function builds it: write {path}:FUNCTION")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and postponed annotations look names up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    build = getattr(module, function, None)
    if not callable(build):
        raise ModelError(f"{path} has no function {function!r}.{near(function, vars(module))}")
    builder: Callable[..., Any] = build
    return builder


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
