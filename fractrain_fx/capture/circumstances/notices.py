"""Hooks that tell of the first call of a module which was looked up on a rewritten model."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Protocol

from torch import nn

from fractrain_fx.capture.source import users_frame

__all__ = ["Notice", "forget_notices"]


class _Listener(Protocol):
    """Is told of calls."""

    original: nn.Module

    def is_user_call(self) -> bool:
        """Whether a call that is made now is the user's own."""

    def tell(self, name: str, at: FrameType | None) -> None:
        """Warn of a call of what was looked up under a name."""


class Notice:
    """A hook on modules that were looked up: tells of the first call, unless it comes from the original's forward."""

    def __init__(self, listener: _Listener | None, name: str) -> None:
        self._listener = listener
        self._name = name

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Tell."""
        if self._listener is None or not self._listener.is_user_call():
            return
        at: FrameType | None = sys._getframe(1)
        while at is not None:
            if at.f_code.co_name == "forward" and at.f_locals.get("self") is self._listener.original:
                return
            at = at.f_back
        self._listener.tell(self._name, users_frame())

    def __reduce__(self) -> Any:
        """A copy of the original gets a hook that tells nobody."""
        return Notice, (None, "")


def forget_notices(model: nn.Module) -> None:
    """Remove the hooks of earlier look-ups from a model that is recorded again."""
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, Notice):
                del module._forward_pre_hooks[key]
