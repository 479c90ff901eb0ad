"""Notice hooks, and replaced forwards, on modules that a graph does not call: nothing runs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fractrain_fx.tied.float_calls import Notice

__all__ = ["TiedHooks"]

_KINDS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}


class TiedHooks:
    """Notes the hooks that modules have when they are recorded, and reports later ones.

    Args:
        uncalled: modules by path that the graph does not call.
    """

    def __init__(self, uncalled: Mapping[str, nn.Module]) -> None:
        self._modules = dict(uncalled)
        self._seen = {path: set(_hooks(module)) for path, module in uncalled.items()}

    def counted(self) -> list[Mapping[int, Any]]:
        """The dictionaries in which torch keeps these modules' hooks."""
        return [vars(module)[kind] for module in self._modules.values() for kind in _KINDS]

    def changes(self) -> list[str]:
        """Hooks that were added since the last look, in words."""
        found = []
        for path, module in self._modules.items():
            hooks = _hooks(module)
            new = [told for key, told in hooks.items() if key not in self._seen[path]]
            found += [f"{told} of {path!r}" if path else f"{told} of the original itself" for told in new]
            self._seen[path] = set(hooks)
        return found


def _hooks(module: nn.Module) -> dict[Any, str]:
    found: dict[Any, str] = {}
    for kind, told in _KINDS.items():
        for key, hook in vars(module)[kind].items():
            if not isinstance(hook, Notice):
                found[kind, key] = f"the {told} {getattr(hook, '__qualname__', type(hook).__qualname__)}"
    if "forward" in vars(module):
        found["forward", id(vars(module)["forward"])] = "the forward that was set on the instance"
    return found
