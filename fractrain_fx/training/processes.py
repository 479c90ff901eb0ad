"""Devices and processes from accelerate, and the state of their random generators for checkpoints."""

from __future__ import annotations

import gc
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from fractrain_fx.engine.distributed import local_part, sum_over_ranks, world_size
from fractrain_fx.errors import ConfigError, NonFiniteLossError, require_packages
from fractrain_fx.memory import keep_freed_memory
from fractrain_fx.training.settings import TrainSettings

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = [
    "end_processes",
    "make_accelerator",
    "random_state",
    "require_finite",
    "seed_all",
    "set_random_state",
    "share_buffers",
]


def make_accelerator(settings: TrainSettings) -> Accelerator:
    """The accelerator for ``settings``; seeds this process, each one differently. On a CPU it keeps memory it frees.

    Raises:
        ConfigError: the device does not exist, or accelerate already runs with other settings in this process.
        MissingPackageError: a package that training needs is missing.
    """
    require_packages("training", "train")
    import torch._dynamo  # noqa: F401  # its first import keeps the threads of a group that is open then for ever
    from accelerate import Accelerator

    try:
        accelerator = Accelerator(
            cpu=settings.device == "cpu",
            mixed_precision=settings.mixed_precision,
            gradient_accumulation_steps=settings.accumulate,
        )
    except ValueError as error:
        raise ConfigError(f"accelerate refuses mixed_precision={settings.mixed_precision!r}: {error}") from error
    if settings.device not in ("auto", accelerator.device.type):
        raise ConfigError(f"device={settings.device!r} is not available; accelerate finds {accelerator.device.type!r}")
    if accelerator.device.type == "cpu":
        keep_freed_memory()
    seed_all(settings.seed + accelerator.process_index)  # with the same noise in each process, it would not average out
    return accelerator


def seed_all(seed: int) -> None:
    """Seed every generator that this process draws from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # of all devices


def end_processes() -> None:
    """Leave the group of processes that accelerate opened; does nothing with one process.

    The group's threads drop the tensors of its last sums at any time. A thread that does so while Python shuts down
    ends the process with SIGABRT. The threads end with the group and every model that holds it, so both must go before.
    """
    if dist.is_available() and dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of every generator that this process draws from, as tensors, numbers and text."""
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
    }


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore the generators from a ``random_state``."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["device"] is not None:
        torch.cuda.set_rng_state(state["device"], device)
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))


def share_buffers(model: nn.Module) -> None:
    """Give each process the running statistics and ranges of the first, which are those in checkpoints."""
    if world_size() > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


def require_finite(model: nn.Module, epoch: int) -> None:
    """Check the weights after an epoch: a loss only shows the weights before its step, not those after the last step.

    A collective, because each process may hold a part of the weights only.

    Raises:
        NonFiniteLossError: a weight is NaN or infinite after ``epoch`` epochs.
    """
    named = dict(model.named_parameters())
    values = [local_part(p) for p in named.values()]
    bad = sum_over_ranks(torch.stack([(~torch.isfinite(x)).any() for x in values]).int())
    for name, broken in zip(named, bad.tolist(), strict=True):
        if broken:
            raise NonFiniteLossError(
                f"after epoch {epoch} the weight {name} is NaN or infinite: lower the learning rate"
            )
