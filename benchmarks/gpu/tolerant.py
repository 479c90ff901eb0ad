"""A method that fails on a GPU is a finding, and the others go on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping

from benchmarks.coverage.checks import cause

__all__ = ["refused"]


@contextlib.contextmanager
def refused(name: str, notes: MutableMapping[str, str]) -> Iterator[None]:
    """Write an error inside into ``notes`` instead of raising it."""
    try:
        yield
    except Exception as error:
        notes[name] = cause(error)[:300]
