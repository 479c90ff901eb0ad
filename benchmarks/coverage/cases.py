"""One model of the sweep: its name, and the model with a batch for the checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

__all__ = ["Case", "NotBuiltError", "Ready", "Suite"]

Suite = Literal["timm", "hf", "torchvision", "libraries"]


class NotBuiltError(Exception):
    """A model cannot be built on this machine, or not without a download, or not from a configuration alone."""


@dataclass(frozen=True)
class Case:
    """A model by name.

    Attributes:
        suite: the suite of the model.
        name: its name in the library.
        group: its family (timm: its module).
    """

    suite: Suite
    name: str
    group: str

    @property
    def key(self) -> str:
        return f"{self.suite}/{self.name}"


@dataclass(frozen=True)
class Ready:
    """A model with one training batch.

    Attributes:
        model: randomly initialised.
        rebuild: builds it again, with the same sizes and other random weights.
        args, kwargs: the batch.
        how: changes that made it smaller, its head and its inputs.
    """

    model: nn.Module
    rebuild: Callable[[], nn.Module]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    how: dict[str, Any] = field(default_factory=dict)
