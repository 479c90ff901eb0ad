"""The code of a model that a recorded run goes through."""

from __future__ import annotations

from types import CodeType, FrameType, FunctionType
from typing import Any

from torch import nn

from fractrain_fx.capture.source import by_capture, by_library, forward_of, is_foreign, outward

__all__ = ["RecordedCode"]


class RecordedCode(dict[CodeType, dict[str, Any]]):
    """The model's own code that made calls of torch or of modules, and forwards; each with its global variables."""

    def note(self, frame: FrameType) -> None:
        """Note the code that makes a call, from its frame outward."""
        for outer in outward(frame):
            if by_capture(outer):
                return
            if not by_library(outer):
                self.setdefault(outer.f_code, outer.f_globals)

    def note_forward(self, module: nn.Module) -> None:
        """Note the forward of a module that is called, which may call nothing but its parts."""
        forward = forward_of(type(module))
        if isinstance(forward, FunctionType) and not is_foreign(str(forward.__module__)):
            self.setdefault(forward.__code__, forward.__globals__)

    def forget(self, count: int) -> None:
        """Keep the first ``count`` alone."""
        for code in list(self)[count:]:
            del self[code]
