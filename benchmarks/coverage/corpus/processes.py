"""One process for each project, forked from a parent that has imported the libraries, with a limit for each check."""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.coverage.corpus.modules import CorpusError, cases_of
from benchmarks.coverage.corpus.page import DIED, NO_MODULES
from benchmarks.coverage.corpus.trial import LateError, Row, examine
from benchmarks.coverage.pool import Limits, confine, fork, freeze

__all__ = ["examined", "limited"]


def examined(path: Path, limits: Limits, heaviest: float = math.inf) -> Iterator[Row]:
    """The row of each module of a project, as it is done.

    A module that ends its process, or stands still, gets a row that says so, and the rest of the project goes on in a
    new process. A project without modules is one row.

    Args:
        path: the file of the project.
        limits: for each check of a module.
        heaviest: see :func:`examine`.
    """
    freeze()
    project, first = path.stem.removeprefix("test_"), 0
    while True:
        process, receiver = fork(_child, path, first, limits, heaviest)
        # The module that the process has begun; at first it imports the file.
        at: Row | None = {"project": project, "index": -1} if not first else None
        with contextlib.suppress(EOFError):
            while receiver.poll(limits.patience * limits.seconds):
                row: Row = receiver.recv()
                at = None if "verdict" in row else row
                if at is None:
                    yield row
        process.kill()
        process.join()
        receiver.close()
        if at is None:
            return
        yield at | {"verdict": DIED, "verdict_cause": f"exit code {process.exitcode}"}
        first = at["index"] + 1
        if not first:
            return


def _child(path: Path, first: int, limits: Limits, heaviest: float, pipe: Connection) -> None:
    confine(limits.gib)
    try:
        cases = cases_of(path)[first:]
    except CorpusError as error:
        row = {"project": path.stem.removeprefix("test_"), "index": -1}
        pipe.send(row | {"verdict": NO_MODULES, "verdict_cause": str(error)})
        return
    for case in cases:
        row = {"project": case.project, "index": case.index, "name": case.name}
        pipe.send(row)
        pipe.send(row | examine(case, lambda: limited(limits.seconds), heaviest))


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise :class:`LateError` after so much processor time, and again: code of others may catch the first."""

    def end(*_: object) -> None:
        raise LateError(f"not done after {seconds:.0f} s of processor time")

    signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds, 5.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
