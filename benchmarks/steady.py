"""Process settings before torch is imported that make times vary less."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["all_cores", "steady"]

# Those that this process may use, before torch is loaded and OpenMP ties this thread to one; Linux only.
_CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


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
        if _CORES is not None:  # torch's compiler would count the cores of the tied thread, and start one process
            os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(32, len(_CORES))))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("FRACTRAIN_FX_TIMINGS", "off")  # the choices are measured too
    from fractrain_fx import keep_freed_memory  # which imports torch

    keep_freed_memory()


@contextmanager
def all_cores() -> Iterator[None]:
    """Processes that start in here may use all cores, as without ``steady``; they inherit this thread's core otherwise.

    For first compiled steps: with all processes of torch's compiler on one core they take a third longer.
    """
    if _CORES is None:
        yield
        return
    tied = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _CORES)
    try:
        yield
    finally:
        os.sched_setaffinity(0, tied)
