"""The noise of stochastic rounding."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["add_dither"]

# Values that a CPU draws ahead: 16 MiB, several times the largest output gradients that one meets.
_POOL = 1 << 22


def add_dither(q: Tensor) -> Tensor:
    """Add noise, uniform in -0.5..0.5 and drawn for each value, to ``q`` in place.

    Drawing is serial on a CPU and would cost more than all of the rounding. There the noise is a stretch of a pool of
    uniform values from a place that the default generator draws, so a seed still fixes it and each call has its own.
    Where a device draws in parallel, where the graph is compiled and for tensors of the pool's order it is drawn anew.
    """
    count = q.numel()
    if q.device.type != "cpu" or torch.compiler.is_compiling() or 2 * count > _POOL:
        return q.add_(torch.rand_like(q).sub_(0.5))
    start = int(torch.randint(_POOL - count, ()))
    return q.add_(_pool(q.dtype)[start : start + count].view(q.shape))


@lru_cache(maxsize=4)
def _pool(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(_POOL, generator=generator, dtype=dtype).sub_(0.5)
