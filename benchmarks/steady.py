"""Process settings before torch is imported that make times vary less."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["all_cores", "steady"]


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
    # torch's compiler starts as many processes as there are cores to its thread: one, once that is tied.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(32, os.cpu_count() or 1)))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("FRACTRAIN_FX_TIMINGS", "off")  # the choices are measured too
    from fractrain_fx import keep_freed_memory  # which imports torch

    keep_freed_memory()


@contextmanager
def all_cores() -> Iterator[None]:
    """Processes that start in here may use all cores, as without ``steady``; they inherit this thread's core otherwise.

    For first compiled steps: with all processes of torch's compiler on one core they take a third longer.
    """
    if not hasattr(os, "sched_setaffinity"):  # only Linux lets a thread be tied to a core
        yield
        return
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # the system leaves out those that this process may not use
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
