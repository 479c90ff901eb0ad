"""The line of a user's code that a call comes from."""

from __future__ import annotations

import sys
from types import FrameType

__all__ = ["CAPTURE", "source_line"]

CAPTURE = __name__.rpartition(".")[0]
"""The package of capture, by which its own functions and frames are recognised."""


def source_line(*apart: str) -> str | None:
    """File and line of the innermost code outside of the packages ``apart``, as ``model.py:42``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if not f"{name}.".startswith(tuple(f"{package}." for package in apart)):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None
