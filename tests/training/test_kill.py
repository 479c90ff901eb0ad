"""Training that is killed without warning and resumed ends with the numbers of a run that was left alone."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import random
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EPOCHS = 12
RUN = ["train", "--model", f"{ROOT}/tests/training/tiny.py:net", "--image-size", "8", "--subset", "96"]
LOOP = ["--epochs", str(EPOCHS), "--batch-size", "32", "--lr", "0.05", "--schedule", "manual", "--device", "cpu"]


def _train(arguments: list[str]) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    from fractrain_fx.cli import main

    raise SystemExit(main(arguments))


def start(arguments: list[str]) -> BaseProcess:
    """A process of its own, forked from a server that has imported all it needs: seconds saved at each start."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["fractrain_fx.training", "accelerate", "sklearn.datasets", "torchmetrics"])
    process = context.Process(target=_train, args=(arguments,))
    process.start()
    return process


def leave_alone(arguments: list[str], out: Path) -> tuple[float, float]:
    """Seconds until the first epoch has ended, and of the whole run."""
    started, first = time.monotonic(), 0.0
    process = start([*arguments, "--out", str(out)])
    while process.is_alive():
        time.sleep(0.01)
        if not first and any(file.stat().st_size for file in out.rglob("metrics.jsonl")):
            first = time.monotonic() - started
    assert process.exitcode == 0
    return first, time.monotonic() - started


def kill_and_resume(arguments: list[str], out: Path, kills: int, longest: float) -> int:
    """Kill at random moments, at most ``kills`` times, and resume until the run is through; count the kills."""
    killed = 0
    while True:
        process = start(
            ["train", "--resume", str(out)] if (out / "config.yaml").exists() else [*arguments, "--out", str(out)]
        )
        process.join(random.uniform(0, longest) if killed < kills else None)
        if process.exitcode == 0:
            return killed
        assert process.exitcode is None, "resuming failed"
        process.kill()
        process.join()
        killed += 1


def outcome(out: Path) -> dict[str, Any]:
    """All that a run leaves, but for the time it took."""
    files = {str(path.relative_to(out)): path for path in sorted(out.rglob("*")) if path.is_file()}
    found: dict[str, Any] = {}
    for name, path in files.items():
        if name.endswith(".jsonl"):
            found[name] = [json.loads(line) | {"seconds": 0} for line in path.read_text().splitlines()]
        elif name.endswith("result.json"):
            found[name] = json.loads(path.read_text()) | {"seconds": 0}
        elif name.endswith("state.json"):
            state = json.loads(path.read_text())
            found[name] = state | {"state": state["state"] | {"seconds": 0}}
        elif name.endswith((".safetensors", "training.pt", "config.yaml")):
            found[name] = path.read_bytes()
    return found


@pytest.mark.parametrize(
    ("kills", "flags"),
    [
        (3, ["--method", "fractrain"]),
        # Two phases, noise in every gradient, and a learning rate of its own at each step.
        pytest.param(20, ["--method", "dfq", "--setting", "fine-tuning"], marks=pytest.mark.slow),
        pytest.param(20, ["--method", "pfq"], marks=pytest.mark.slow),
    ],
)
def test_killed_and_resumed_training_ends_as_if_left_alone(kills: int, flags: list[str], tmp_path: Path) -> None:
    arguments = [*RUN, *LOOP, *flags]
    first, whole = leave_alone(arguments, tmp_path / "whole")
    expected = outcome(tmp_path / "whole")
    assert len(expected["metrics.jsonl"]) == EPOCHS
    # From the start of the process to a few epochs after its first.
    longest = first + 3 * (whole - first) / EPOCHS
    killed, turn = 0, 0
    while killed < kills:
        out = tmp_path / f"killed-{turn}"
        killed += kill_and_resume(arguments, out, kills - killed, longest)
        assert outcome(out) == expected
        turn += 1
