"""Process settings before torch is imported that make times vary less."""

from __future__ import annotations

import ctypes
import os
import sys

__all__ = ["steady"]

# Parameters of glibc's mallopt, and the largest sizes that it takes.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER, _LARGEST = 2**31 - 1, 32 * 2**20


def steady() -> None:
    """Tie each thread to a core, and keep memory that was freed. Nothing is downloaded.

    A thread that moves makes small operations a hundred times slower. Memory that is returned to the system after a
    step and fetched in the next one costs some steps, by chance, up to a twentieth of their time.

    Only call it in a program of its own: a process that imports OpenMP later is tied to its first core.
    """
    os.environ.setdefault("OMP_PROC_BIND", "true")
    os.environ.setdefault("OMP_PLACES", "cores")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:  # only glibc has it
        mallopt(_MMAP_THRESHOLD, _LARGEST)
        mallopt(_TRIM_THRESHOLD, _NEVER)
