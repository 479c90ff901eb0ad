"""Finds the module of the model that a module of this package replaces in the copy that runs."""

from __future__ import annotations

from torch import nn

__all__ = ["Original"]


class Original:
    """Finds a module of the model anew at each call, because another one (a synchronised norm, say) may replace it.

    It keeps the children of the module's parent, so that it needs the module's own name alone: equal blocks then have
    equal ones, and torch's compiler compiles them once. It is not an ``nn.Module``, so torch does not register the
    module that it finds under a second name.

    Args:
        modules: children of the model, by name.
        path: the module's path in the model.
    """

    def __init__(self, modules: dict[str, nn.Module], path: str) -> None:
        self.path = path
        *parents, self._name = path.split(".")
        for name in parents:
            modules = modules[name]._modules  # type: ignore[assignment]
        self._siblings = modules

    def __repr__(self) -> str:
        return f"Original({self._name!r})"

    def find(self) -> nn.Module:
        """The module that is there now."""
        return self._siblings[self._name]
