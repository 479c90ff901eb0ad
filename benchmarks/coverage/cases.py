"""One model of the sweep: its name, and what a builder hands over for the checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

__all__ = ["Case", "NotBuiltError", "Ready", "Suite"]

Suite = Literal["timm", "hf", "torchvision", "libraries"]


class NotBuiltError(Exception):
    """A model that cannot be made here: not by this machine, not without a download, not from a configuration alone."""


@dataclass(frozen=True)
class Case:
    """A model by name.

    Attributes:
        suite: where it comes from.
        name: what that library calls it.
        group: the family it is counted under (timm: its module).
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
        rebuild: makes it again, with the same sizes and other random weights.
        args, kwargs: the batch.
        how: what was changed to make it fit, and which head and inputs it got.
    """

    model: nn.Module
    rebuild: Callable[[], nn.Module]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    how: dict[str, Any] = field(default_factory=dict)
