"""One process for each model with a time and a memory limit, forked from a parent that has imported the libraries."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess

from benchmarks.coverage.cases import Case, Ready
from benchmarks.coverage.trial import CHECKS, Row, examine

__all__ = ["Limits", "confine", "fork", "freeze", "run"]

_FORK = multiprocessing.get_context("fork")


# Seconds between two looks at the processes, and the most that counts of that time: more passes if this process stood
# still too, because the machine slept or the sweep was paused.
_PULSE, _PAUSE = 0.2, 2.0


@dataclass(frozen=True)
class Limits:
    """The limits for one model.

    Attributes:
        seconds: processor time.
        gib: memory beyond the parent's.
        patience: wall time, in multiples of ``seconds``, after which a process that waits is ended.
    """

    seconds: float
    gib: float
    patience: float = 20.0


@dataclass
class _Running:
    case: Case
    process: ForkProcess
    pipe: Connection
    patience: float
    last: Row


def run(cases: Sequence[Case], build: Callable[[Case], Ready], limits: Limits, jobs: int) -> Iterator[tuple[Case, Row]]:
    """Examine every case, ``jobs`` at a time; yields each with its row as it ends."""
    freeze()
    waiting = list(reversed(cases))
    running: list[_Running] = []
    before = time.monotonic()
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(_start(waiting.pop(), build, limits))
        wait([job.pipe for job in running], timeout=_PULSE)
        passed, before = time.monotonic() - before, time.monotonic()
        for job in list(running):
            job.patience -= min(passed, _PAUSE)
            row = _finished(job, limits)
            if row is not None:
                running.remove(job)
                yield job.case, row


def _start(case: Case, build: Callable[[Case], Ready], limits: Limits) -> _Running:
    process, receiver = fork(_child, case, build, limits)
    return _Running(case, process, receiver, limits.patience * limits.seconds, {"checks": {}, "at": "build"})


def _finished(job: _Running, limits: Limits) -> Row | None:
    """The row of a model whose process has ended, or is ended here because it stands still."""
    try:
        while job.pipe.poll():
            job.last = job.pipe.recv()
    except EOFError:
        job.process.join()
        cause = f"the process died (exit code {job.process.exitcode})"
        if job.process.exitcode == -signal.SIGXCPU:
            cause = f"not done after {limits.seconds:.0f} s of processor time"
    else:
        if job.patience > 0:
            return None
        job.process.kill()
        job.process.join()
        cause = f"it stands still: not done after {limits.patience * limits.seconds:.0f} s"
    job.pipe.close()
    row = job.last
    at = row.pop("at", None)
    if at is not None:
        row["checks"] = {name: row["checks"].get(name, "not reached") for name in CHECKS} | {at: "failed"}
        row.setdefault("failed_at", at)
        row.setdefault("cause", cause)
        row.setdefault("verdict", "failed")
    return row


def fork(target: Callable[..., None], *arguments: object) -> tuple[ForkProcess, Connection]:
    """Start ``target(*arguments, pipe)`` in a new process; returns the process and the other end of the pipe."""
    receiver, sender = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=target, args=(*arguments, sender), daemon=True)
    process.start()
    sender.close()
    return process, receiver


def confine(gib: float) -> None:
    """Let this process print nothing, and take at most so much more memory."""
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    pages = int(open("/proc/self/statm").read().split()[0])  # noqa: SIM115
    limit = pages * resource.getpagesize() + int(gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def freeze() -> None:
    """Keep garbage collections in children from touching, and so copying, every page of the libraries' objects."""
    gc.collect()
    gc.freeze()


def _child(case: Case, build: Callable[[Case], Ready], limits: Limits, pipe: Connection) -> None:
    confine(limits.gib)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limits.seconds), resource.RLIM_INFINITY))
    start = time.process_time()
    row = examine(lambda: build(case), pipe.send)
    row["seconds"]["all"] = round(time.process_time() - start, 1)
    row["peak_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
    pipe.send(row)
