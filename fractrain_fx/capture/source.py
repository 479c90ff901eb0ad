"""The line of a model's code that a call comes from."""

from __future__ import annotations

import sys
from types import FrameType

__all__ = ["source_line"]


def source_line() -> str | None:
    """File and line of the innermost code that is neither torch's nor the recorder's, as ``model.py:42``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] != "torch" and not name.startswith("fractrain_fx.capture"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None
