"""One model of a third-party library: how to build it from a small configuration, and its inputs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Entry", "Module", "features", "image", "mask", "tokens"]


@dataclass(frozen=True)
class Entry:
    """A model of the suite.

    Attributes:
        library: the project's name on PyPI.
        name: the model's class, with a suffix if there are several of that class.
        make: builds it with random weights.
        inputs: one training batch: positional inputs as a tuple, keyword inputs as a dictionary.
    """

    library: str
    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...] | dict[str, Any]]


class Module:
    """A Python module that is imported when one of its names is first read.

    A process that examines one model imports only that model's library. Some libraries change torch's classes.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._path), name)


def image(channels: int = 3, *sides: int) -> Tensor:
    """Two images (or volumes) of these sides, by default 64 x 64."""
    return torch.randn(2, channels, *(sides or (64, 64)))


def tokens(length: int = 16, vocabulary: int = 64) -> Tensor:
    """Two texts."""
    return torch.randint(1, vocabulary, (2, length))


def mask(length: int = 16) -> Tensor:
    """The attention mask of two texts, of which the second ends earlier."""
    kept = torch.ones(2, length, dtype=torch.bool)
    kept[1, -length // 4 :] = False
    return kept


def features(length: int = 16, width: int = 32) -> Tensor:
    """Two sequences of feature vectors."""
    return torch.randn(2, length, width)
