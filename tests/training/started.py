"""Training commands in processes of their own, which may be killed."""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
from multiprocessing.process import BaseProcess
from pathlib import Path

__all__ = ["RUN", "start"]

ROOT = Path(__file__).parents[2]
RUN = ["train", "--model", f"{ROOT}/tests/training/tiny.py:net", "--image-size", "8", "--subset", "96"]


def _train(arguments: list[str], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    from fractrain_fx.cli import main

    raise SystemExit(main(arguments))


def start(arguments: list[str], ranks: int) -> list[BaseProcess]:
    """Processes forked from a server that has imported all they need, which saves seconds at each start."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["fractrain_fx.training", "accelerate", "sklearn.datasets", "torchmetrics"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        together = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    processes: list[BaseProcess] = []
    for rank in range(ranks):
        environment = together | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
        processes.append(context.Process(target=_train, args=(arguments, environment)))
        processes[-1].start()
    return processes
