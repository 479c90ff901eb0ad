"""Two other ways to a graph of a whole module, to compare with: ``torch.export`` and ``torch.compile``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["compiled", "exported"]


def exported(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The graph of ``torch.export``, as a module."""
    return torch.export.export(module, args, kwargs).module()


def compiled(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The graph that ``torch.compile`` records at the first call, or an error if one graph is not enough."""
    torch.compiler.reset()
    return torch.compile(module, fullgraph=True, backend="eager")
