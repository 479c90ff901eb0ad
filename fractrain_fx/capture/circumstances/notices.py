"""Hooks that tell of calls of modules that were looked up on a rewritten model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["Notice", "forget_notices"]


class Notice:
    """A hook on modules that were looked up; calls ``told`` with the name of the look-up at each of their calls."""

    def __init__(self, told: Callable[[str], None] | None, name: str) -> None:
        self._told, self._name = told, name

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Tell."""
        if self._told is not None:
            self._told(self._name)

    def __reduce__(self) -> Any:
        """A copy of the original gets a hook that tells nobody."""
        return Notice, (None, "")


def forget_notices(model: nn.Module) -> None:
    """Remove the hooks of earlier look-ups from a model that is recorded again."""
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, Notice):
                del module._forward_pre_hooks[key]
