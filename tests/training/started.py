"""Training commands in processes of their own, which may be killed."""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

__all__ = ["RUN", "another_process", "start"]

ROOT = Path(__file__).parents[2]
RUN = ["train", "--model", f"{ROOT}/tests/training/tiny.py:net", "--image-size", "8", "--subset", "96"]

_HOLDING = """
import sys
from pathlib import Path
from fractrain_fx.training.folder.held import hold
held = hold(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds ``folder`` until its input ends."""
    command = [sys.executable, "-c", _HOLDING, str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process


def _train(arguments: list[str], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    from fractrain_fx.cli import main

    raise SystemExit(main(arguments))


def start(arguments: list[str], ranks: int) -> list[BaseProcess]:
    """Processes forked from a server that has imported all they need, which saves seconds at each start."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["fractrain_fx.training", "accelerate", "sklearn.datasets"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        together = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    processes: list[BaseProcess] = []
    for rank in range(ranks):
        environment = together | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
        processes.append(context.Process(target=_train, args=(arguments, environment)))
        processes[-1].start()
    return processes
