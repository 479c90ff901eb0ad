"""Process settings before torch is imported that make times vary less."""

from __future__ import annotations

import os

__all__ = ["steady"]


def steady(*, bound: bool = True) -> None:
    """Keep memory that was freed, as training does, and tie each thread to a core. Nothing is downloaded.

    A thread that moves makes small operations on a CPU a hundred times slower.

    Only call it in a program of its own: a process that imports OpenMP later is tied to its first core.

    Args:
        bound: whether to tie threads to cores. Where a GPU computes, it only crowds processes onto the first core:
            those of this program, and those in which torch's compiler works.
    """
    if bound:
        os.environ.setdefault("OMP_PROC_BIND", "true")
        os.environ.setdefault("OMP_PLACES", "cores")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("FRACTRAIN_FX_TIMINGS", "off")  # the choices are measured too
    from fractrain_fx import keep_freed_memory  # which imports torch

    keep_freed_memory()
