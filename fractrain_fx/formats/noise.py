"""The noise of stochastic rounding: uniform, fixed by a seed that is a tensor, cheap on every device."""

from __future__ import annotations

from functools import lru_cache

import torch
from jaxtyping import Int
from torch import Tensor

from fractrain_fx.formats.bits import once, readable

__all__ = ["APART", "dither", "draw_seed", "hashed", "noise_number"]

# Noise values drawn in advance: 16 MiB, several times as many as large output gradients have.
_POOL = 1 << 22
_MASK = (1 << 64) - 1

APART = 0x5851F42D4C957F2
"""How far apart the seeds of an op's several kinds of noise lie. Seeds of other ops lie close to its own."""


def draw_seed(device: torch.device | str = "cpu") -> Int[Tensor, ""]:
    """A fresh seed from torch's default generator of a device (0-dim int64)."""
    return torch.randint(1 << 62, (), device=device)


def noise_number(stochastic: bool, seed: Int[Tensor, ""] | None) -> int | None:
    """The seed of a kernel's noise, which the host knows; a fresh one where none is given; ``None`` without noise."""
    return int(draw_seed() if seed is None else seed) if stochastic else None


def dither(like: Tensor, seed: Int[Tensor, ""] | None = None) -> Tensor:
    """Noise, uniform in -0.5..0.5, of the shape and type of ``like``; equal seeds give equal noise. Read-only.

    Drawing numbers is serial on a CPU and would take longer than the rounding itself. So the noise is a slice of a
    pool, at a place that follows from the seed. The pool is a random order of evenly spaced values, whose mean is
    exactly 0. A compiled graph hashes position and seed instead, which fuses with the rounding.
    """
    count = like.numel()
    if torch.compiler.is_compiling():
        return hashed(count, like, draw_seed(like.device) if seed is None else seed)
    seed = draw_seed() if seed is None else seed
    if readable(seed) and 2 * count <= _POOL and like.is_cpu:
        start = _mixed(int(seed)) % (_POOL - count)
        return _pool(like.dtype, like.device)[start : start + count].view(like.shape)
    # A seed is neither copied to the device nor read from it, which would have to wait.
    first = int(seed) % _POOL if readable(seed) else seed % _POOL
    places = (torch.arange(count, device=like.device) + first) % _POOL
    return _pool(like.dtype, like.device)[places].view(like.shape)


@lru_cache(maxsize=4)
def _pool(dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(_POOL, generator=generator)
    return order.double().add_(0.5).div_(_POOL).sub_(0.5).to(dtype).to(device)


def _mixed(seed: int) -> int:
    """Splitmix64's finisher: neighbouring seeds give places far apart."""
    seed = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    seed = ((seed ^ (seed >> 27)) * 0x94D049BB133111EB) & _MASK
    return seed ^ (seed >> 31)


def hashed(count: int, like: Tensor, seed: Tensor) -> Tensor:
    """A 32-bit integer hash of each position and the seed, as a value in -0.5..0.5."""
    low = once((seed & 0x7FFFFFFF).to(torch.int32))
    high = once(((seed >> 31) & 0x7FFFFFFF).to(torch.int32))
    h = torch.arange(count, dtype=torch.int32, device=like.device) ^ low
    # Shifts of signed numbers bring in copies of the sign, which the masks remove.
    h = (h ^ ((h >> 16) & 0xFFFF)) * 0x7FEB352D
    h = h + high
    h = (h ^ ((h >> 15) & 0x1FFFF)) * -0x7B935975  # 0x846CA68B as a signed number
    # float32 holds 24 bits exactly, and the product mixes the upper ones best.
    return ((h >> 8).to(like.dtype) * 2.0**-24).view(like.shape)
