"""Sums and lists over the processes of a run, and errors of a lost process. One process gets the value itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fractrain_fx.errors import FracTrainError

__all__ = [
    "LOST",
    "gather_over_ranks",
    "is_first",
    "is_lost_process",
    "is_sharded",
    "local_part",
    "mean_over_ranks",
    "on_first",
    "sum_over_ranks",
    "syncs_batch_norm",
    "world_size",
]

LOST = (
    "another process of this run ended or cannot be reached, so this one cannot go on. The first process that failed "
    "says why, unless it was killed (out of memory, for example): start all processes again from the last checkpoint"
)
_WORDS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "heartbeat")

_Value = TypeVar("_Value")


def world_size() -> int:
    """The number of processes that train together."""
    return dist.get_world_size() if _together() else 1


def is_first() -> bool:
    """Whether this process is the first of the processes that train together."""
    return not _together() or dist.get_rank() == 0


def sum_over_ranks(values: Tensor) -> Tensor:
    """``values`` added up over all processes, in place; a collective, so each process must call it.

    They may lie on a device that the processes do not exchange tensors of, such as the CPU under NCCL.
    """
    if _together():
        kinds = [pair.partition(":")[0] for pair in dist.get_backend_config().split(",")]  # "cpu:gloo,cuda:nccl"
        exchanged = values if values.device.type in kinds else values.to(kinds[0])
        dist.all_reduce(exchanged)
        values.copy_(exchanged)
    return values


def mean_over_ranks(value: float) -> float:
    """The mean of a number that each process passed; a collective, so each process must call it."""
    return float(sum_over_ranks(torch.tensor(value, dtype=torch.float64))) / world_size()


def gather_over_ranks(value: _Value) -> list[_Value]:
    """The value of each process, in the order of the processes; a collective, so each process must call it."""
    if not _together():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def on_first(act: Callable[[], _Value]) -> _Value:
    """What ``act`` returns to the first process, or, on every process, the error that it raises there; a collective."""
    if not _together():
        return act()
    outcome: Any = None
    if is_first():
        try:
            outcome = act()
        except FracTrainError as error:
            outcome = error
    outcome = gather_over_ranks(outcome)[0]
    if isinstance(outcome, FracTrainError):
        raise outcome
    value: _Value = outcome
    return value


def is_lost_process(error: BaseException) -> bool:
    """Whether an error of torch says that another process is gone."""
    if not _together():
        return False
    return isinstance(error, dist.DistError) or any(words in str(error) for words in _WORDS)


def _together() -> bool:
    return dist.is_available() and dist.is_initialized()


def syncs_batch_norm(model: nn.Module) -> bool:
    """Whether batch norms of a model wait for other processes, so that it cannot run in this one alone."""
    return _together() and any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())


def is_sharded(x: Tensor) -> bool:
    """Whether a tensor is split over processes (torch's DTensor)."""
    return hasattr(x, "to_local")


def local_part(x: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    part: Tensor = x.to_local() if is_sharded(x) else x  # type: ignore[attr-defined]
    return part
