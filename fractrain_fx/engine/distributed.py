"""Sums and lists over the processes of a run. With one process they give the value itself."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["gather_over_ranks", "is_first", "mean_over_ranks", "sum_over_ranks", "world_size"]

_Value = TypeVar("_Value")


def world_size() -> int:
    """The number of processes that train together."""
    return dist.get_world_size() if _together() else 1


def is_first() -> bool:
    """Whether this process is the first of the processes that train together."""
    return not _together() or dist.get_rank() == 0


def sum_over_ranks(values: Tensor) -> Tensor:
    """``values`` added up over all processes, in place; a collective, so each process must call it."""
    if _together():
        dist.all_reduce(values)
    return values


def mean_over_ranks(value: float, device: torch.device) -> float:
    """The mean of a number that each process passed, by tensors on a device; each process must call it."""
    if not _together():
        return value
    return float(sum_over_ranks(torch.tensor(value, dtype=torch.float64, device=device))) / world_size()


def gather_over_ranks(value: _Value) -> list[_Value]:
    """The value of each process, in the order of the processes; a collective, so each process must call it."""
    if not _together():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def _together() -> bool:
    return dist.is_available() and dist.is_initialized()
