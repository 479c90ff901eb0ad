"""Warnings that name the user's line of code, however deep the call that warns."""

from __future__ import annotations

import warnings
from types import FrameType

from fractrain_fx.capture.source import users_frame
from fractrain_fx.errors import FracTrainWarning

__all__ = ["warn"]


def warn(words: str, at: FrameType | None = None, category: type[Warning] = FracTrainWarning) -> None:
    """Warn at a frame, by default the innermost one outside torch and this package."""
    at = at or users_frame()
    if at is None:
        warnings.warn(words, category, stacklevel=2)
    else:
        warnings.warn_explicit(words, category, at.f_code.co_filename, at.f_lineno)
