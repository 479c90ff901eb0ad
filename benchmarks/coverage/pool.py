"""One process for each model, forked from a parent that has the libraries loaded, with a time and a memory limit."""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess

from benchmarks.coverage.cases import Case, Ready
from benchmarks.coverage.trial import CHECKS, Row, examine

__all__ = ["Limits", "run"]

_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Limits:
    """What one model may use: seconds of wall time, and GiB of memory beyond what the parent holds."""

    seconds: float
    gib: float


@dataclass
class _Running:
    case: Case
    process: ForkProcess
    pipe: Connection
    deadline: float
    last: Row


def run(cases: Sequence[Case], build: Callable[[Case], Ready], limits: Limits, jobs: int) -> Iterator[tuple[Case, Row]]:
    """Examine every case, ``jobs`` at a time; yields each with its row as it ends."""
    waiting = list(reversed(cases))
    running: list[_Running] = []
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(_start(waiting.pop(), build, limits))
        wait([each.pipe for each in running], timeout=0.2)
        for each in list(running):
            row = _finished(each, limits)
            if row is not None:
                running.remove(each)
                yield each.case, row


def _start(case: Case, build: Callable[[Case], Ready], limits: Limits) -> _Running:
    receiver, sender = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_child, args=(case, build, limits, sender), daemon=True)
    process.start()
    sender.close()
    return _Running(case, process, receiver, time.monotonic() + limits.seconds, {"checks": {}, "at": "build"})


def _finished(each: _Running, limits: Limits) -> Row | None:
    """The row of a model whose process has ended (or is ended here, at its deadline)."""
    try:
        while each.pipe.poll():
            each.last = each.pipe.recv()
    except EOFError:
        each.process.join()
        cause = f"the process died (exit code {each.process.exitcode})"
    else:
        if time.monotonic() < each.deadline:
            return None
        each.process.kill()
        each.process.join()
        cause = f"not done after {limits.seconds:.0f} s"
    each.pipe.close()
    row = each.last
    at = row.pop("at", None)
    if at is not None:
        row["checks"] = {name: row["checks"].get(name, "not reached") for name in CHECKS} | {at: "failed"}
        row.setdefault("failed_at", at)
        row.setdefault("cause", cause)
    return row


def _child(case: Case, build: Callable[[Case], Ready], limits: Limits, pipe: Connection) -> None:
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    pages = int(open("/proc/self/statm").read().split()[0])  # noqa: SIM115
    limit = pages * resource.getpagesize() + int(limits.gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    start = time.perf_counter()
    row = examine(lambda: build(case), pipe.send)
    row["seconds"]["all"] = round(time.perf_counter() - start, 1)
    row["peak_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
    pipe.send(row)
