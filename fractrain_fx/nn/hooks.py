"""Hooks of modules: code that runs a module by other means must not pass them by."""

from __future__ import annotations

from torch import nn

__all__ = ["is_hooked"]


def is_hooked(module: nn.Module) -> bool:
    """Whether a module has hooks on its calls or gradients."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)
