"""Warnings that name the user's line of code, however deep the call that warns."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

from fractrain_fx.capture.source import by_library
from fractrain_fx.errors import FracTrainWarning

__all__ = ["users_frame", "warn"]


def warn(words: str, at: FrameType | None = None, category: type[Warning] = FracTrainWarning) -> None:
    """Warn at a frame, by default the innermost one outside torch and this package."""
    at = at or users_frame()
    if at is None:
        warnings.warn(words, category, stacklevel=2)
    else:
        warnings.warn_explicit(words, category, at.f_code.co_filename, at.f_lineno)


def users_frame() -> FrameType | None:
    """The innermost frame outside torch and this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and by_library(frame):
        frame = frame.f_back
    return frame
