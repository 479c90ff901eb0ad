"""What a benchmark sets before torch is loaded."""

from __future__ import annotations

import os

__all__ = ["bind_threads"]


def bind_threads() -> None:
    """Tie each thread to a core; one that moves makes small operations a hundred times slower. Nothing is downloaded.

    Only for a program: whatever loads OpenMP later in a process ties that process to its first core.
    """
    os.environ.setdefault("OMP_PROC_BIND", "true")
    os.environ.setdefault("OMP_PLACES", "cores")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
