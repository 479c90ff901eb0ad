"""A module of the model behind one of this package, which stands in its place in the copy that runs."""

from __future__ import annotations

from torch import nn

__all__ = ["Original", "is_hooked"]


class Original:
    """Finds a module of the model at each call, as another one (a synchronised norm, say) may have taken its place.

    No module, so that torch registers nothing through it: what is found must not get a second name.

    Args:
        modules: children of the model, by name.
        path: of the module.
    """

    def __init__(self, modules: dict[str, nn.Module], path: str) -> None:
        self._modules, self._path = modules, path.split(".")

    def find(self) -> nn.Module:
        """The module that is there now."""
        modules = self._modules
        for name in self._path[:-1]:
            modules = modules[name]._modules  # type: ignore[assignment]
        return modules[self._path[-1]]


def is_hooked(module: nn.Module) -> bool:
    """Whether somebody listens to its calls or gradients."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)
