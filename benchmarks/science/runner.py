"""Train several runs at a time, each in a process of one thread with low priority."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.science.folder import LOCKED, is_done
from benchmarks.science.grid import Run

__all__ = ["Place", "work_off"]

_LOOK = 2.0  # seconds between looks at the processes


@dataclass(frozen=True)
class Place:
    """Folders and limits of the runs.

    Attributes:
        runs: has a folder for each run.
        data_dir: folder of the data sets' files.
        jobs: processes at a time.
        niceness: niceness of each process, 0 to 19.
    """

    runs: Path
    data_dir: str | None
    jobs: int = 2
    niceness: int = 19


def work_off(runs: Sequence[Run], place: Place, finished: Callable[[Run], None]) -> list[Run]:
    """Train all unfinished runs in order; returns those that failed.

    Runs that another process is training are left to it. If this process is stopped, its runs stop too, and continue
    from their last checkpoints when it is called again.
    """
    waiting = [run for run in runs if not is_done(place.runs / run.name)]
    running: dict[Run, subprocess.Popen[bytes]] = {}
    failed: list[Run] = []
    try:
        while waiting or running:
            while waiting and len(running) < place.jobs:
                run = waiting.pop(0)
                running[run] = _start(run, place)
            time.sleep(_LOOK)
            for run, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[run]
                if process.returncode == 0:
                    finished(run)
                elif process.returncode != LOCKED:
                    failed.append(run)
    finally:
        for process in running.values():
            process.terminate()
    return failed


def _start(run: Run, place: Place) -> subprocess.Popen[bytes]:
    folder = place.runs / run.name
    folder.mkdir(parents=True, exist_ok=True)
    axes = [f"--{name}={value}" for name, value in vars(run).items()]
    data = [] if place.data_dir is None else [f"--data-dir={place.data_dir}"]
    command = [sys.executable, "-m", "benchmarks.science", "train", *axes, f"--runs={place.runs}", *data]
    with (folder / "output.txt").open("ab") as output:
        process = subprocess.Popen(
            ["nice", "-n", str(place.niceness), *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            start_new_session=True,
        )
    # Linux shares processors among sessions first, and niceness counts inside a session only.
    with contextlib.suppress(OSError):
        Path(f"/proc/{process.pid}/autogroup").write_text(str(place.niceness), encoding="ascii")
    return process
