"""Errors of a model that is tried out. A lack of memory is not one of them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch

__all__ = ["ignored_model_errors", "is_out_of_memory", "model_errors"]

# Words of torch's allocators, which raise plain RuntimeErrors on a CPU, and of the libraries that it calls on a GPU.
_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the memory of the machine or of a GPU does not suffice."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def model_errors() -> tuple[type[Exception], ...]:
    """The errors to catch around a model's code, which may raise anything: all of them, unless memory lacks.

    A lack of memory is passed on, because another moment or machine may have enough: it says nothing of the model.

    For ``except model_errors():`` alone, which calls this once an error was raised.
    """
    error = sys.exception()
    return () if error is not None and is_out_of_memory(error) else (Exception,)


@contextlib.contextmanager
def ignored_model_errors() -> Iterator[None]:
    """Leave the block at an error of the model, and go on after it."""
    try:
        yield
    except model_errors():
        return
