"""Processes that prepare an item each, all at a time, and measure in turn when they are told to.

A large model's step takes minutes to compile, most of it in one thread, and the host of a GPU has many cores.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

__all__ = ["Standby", "kill", "standing_by", "wait_to_be_told"]

_READY = b"ready\n"
# Cores for each process: the one that traces, and those in which torch's compiler works.
_CORES = 3


@dataclass
class Standby:
    """Processes by item.

    Attributes:
        calls: the command line of each item; it calls :func:`wait_to_be_told`.
        has_room: whether there is memory for one more process; those that are ready keep theirs.
    """

    calls: Mapping[str, Sequence[str]]
    has_room: Callable[[], bool]
    _children: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _prepared: dict[str, Future[bool]] = field(default_factory=dict)
    _over: bool = False

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // _CORES))
        self._prepared = {item: self._pool.submit(self._prepare, item) for item in self.calls}

    def _prepare(self, item: str) -> bool:
        """Start a process and wait until it is ready; False if it ended before, or was not started."""
        if self._over or not self.has_room():
            return False
        pipe, environment = subprocess.PIPE, {"TORCHINDUCTOR_COMPILE_THREADS": str(_CORES - 1)}
        self._children[item] = child = subprocess.Popen(
            self.calls[item], env=os.environ | environment, stdin=pipe, stdout=pipe, start_new_session=True
        )
        if self._over:  # since it was started
            kill(child)
        assert child.stdout is not None
        return _READY in iter(child.stdout.readline, b"")

    def ready(self, seconds: float) -> list[str]:
        """Wait until all are ready or the time is over, and end the others."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not all(future.done() for future in self._prepared.values()):
            time.sleep(0.1)
        ready = [item for item, future in self._prepared.items() if future.done() and future.result()]
        self.end(keep=ready)
        return ready

    def measure(self, item: str, ended: Callable[[subprocess.Popen[bytes]], str]) -> str:
        """Tell a process to go on, and say how it ended."""
        child = self._children[item]
        assert child.stdin is not None
        child.stdin.write(b"\n")
        child.stdin.close()
        return ended(child)

    def end(self, keep: Sequence[str] = ()) -> None:
        """End the processes of all items but some."""
        self._over = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        for item, child in list(self._children.items()):
            if item not in keep:
                kill(child)


def kill(child: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a session, and all processes of that session."""
    with contextlib.suppress(ProcessLookupError):  # nothing is left
        os.killpg(child.pid, signal.SIGKILL)


@contextlib.contextmanager
def standing_by(calls: Mapping[str, Sequence[str]], has_room: Callable[[], bool]) -> Iterator[Standby]:
    """Prepare items in processes that end with the block (:class:`Standby`)."""
    standby = Standby(calls, has_room)
    try:
        yield standby
    finally:
        standby.end()


def wait_to_be_told() -> None:
    """In such a process: say that it is ready, and wait."""
    sys.stdout.buffer.write(_READY)
    sys.stdout.buffer.flush()
    sys.stdin.buffer.readline()
