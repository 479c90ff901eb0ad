"""Sums over the processes of a run; the identity where there is one."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

__all__ = ["is_first", "sum_over_ranks", "world_size"]


def world_size() -> int:
    """Processes that train together."""
    return dist.get_world_size() if _together() else 1


def is_first() -> bool:
    """Whether this process is the first of those that train together."""
    return not _together() or dist.get_rank() == 0


def sum_over_ranks(values: Tensor) -> Tensor:
    """``values`` added up over all processes, in place; a collective, so each process must call it."""
    if _together():
        dist.all_reduce(values)
    return values


def _together() -> bool:
    return dist.is_available() and dist.is_initialized()
