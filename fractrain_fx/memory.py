"""Let a process keep the memory that it frees, because the next training step needs as much again."""

from __future__ import annotations

import ctypes
import os
import sys

__all__ = ["keep_freed_memory", "return_freed_memory"]

# Parameters of glibc's mallopt, and the largest sizes that it takes.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER, _LARGEST = 2**31 - 1, 32 * 2**20
_ENVIRONMENT = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Keep memory that was freed in this process, in blocks of up to 32 MiB, and use it again.

    Without this, glibc (the C library of most Linux systems) returns the memory of large tensors to the system when a
    step frees them, and the next step pays for getting it back. The process then stays as large as its largest step.
    :class:`fractrain_fx.training.Trainer` and ``fractrain train`` call this on a CPU; call it in a loop of your own.
    ``MALLOC_TRIM_THRESHOLD_`` with ``MALLOC_MMAP_THRESHOLD_``, or another allocator such as jemalloc, do the same.

    Returns:
        Whether this changed something: ``False`` where the C library is another, or where the environment has settings
        of its own for the allocator.
    """
    if sys.platform != "linux" or any(name in os.environ for name in _ENVIRONMENT):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    return mallopt is not None and bool(mallopt(_MMAP_THRESHOLD, _LARGEST)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))


def return_freed_memory() -> None:
    """Give memory that was freed in this process back to the system, if its C library is glibc.

    Glibc keeps freed blocks between blocks in use, to serve later requests. After many tensors of different sizes were
    made and freed, that is as much memory again. Only rewriting a model calls this, not training.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
