"""Finds the module of the model that a module of this package replaces in the copy that runs."""

from __future__ import annotations

from torch import nn

__all__ = ["Original", "is_hooked"]


class Original:
    """Finds a module of the model anew at each call, because another one (a synchronised norm, say) may replace it.

    This is not an ``nn.Module``, so torch does not register the module that it finds under a second name.

    Args:
        modules: children of the model, by name.
        path: the module's path in the model.
    """

    def __init__(self, modules: dict[str, nn.Module], path: str) -> None:
        self._modules, self._path = modules, path.split(".")

    @property
    def path(self) -> str:
        """The path of the module in the model."""
        return ".".join(self._path)

    def find(self) -> nn.Module:
        """The module that is at the path now."""
        modules = self._modules
        for name in self._path[:-1]:
            modules = modules[name]._modules  # type: ignore[assignment]
        return modules[self._path[-1]]


def is_hooked(module: nn.Module) -> bool:
    """Whether a module has hooks on its calls or gradients."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)
