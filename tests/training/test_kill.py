"""Training that is killed without warning and resumed ends with the numbers of a run that was left alone."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.training.started import RUN, start

pytestmark = pytest.mark.long

EPOCHS = 12
LOOP = ["--epochs", str(EPOCHS), "--batch-size", "32", "--lr", "0.05", "--schedule", "manual", "--device", "cpu"]


def leave_alone(arguments: list[str], out: Path, ranks: int) -> tuple[float, float]:
    """Seconds until the first epoch has ended, and of the whole run."""
    started, first = time.monotonic(), 0.0
    processes = start([*arguments, "--out", str(out)], ranks)
    while any(process.is_alive() for process in processes):
        time.sleep(0.01)
        # Of one phase or of each; a search through all folders would meet checkpoints while they are renamed.
        metrics = [out / "metrics.jsonl", *out.glob("*/metrics.jsonl")]
        if not first and any(file.exists() and file.stat().st_size for file in metrics):
            first = time.monotonic() - started
    assert [process.exitcode for process in processes] == [0] * ranks
    return first, time.monotonic() - started


def kill_and_resume(arguments: list[str], out: Path, ranks: int, kills: int, longest: float) -> tuple[int, float]:
    """Kill at random moments, at most ``kills`` times, and resume until the run is through.

    Returns:
        How often it was killed, and for how many seconds its last process ran.
    """
    killed = 0
    while True:
        begun, started = (out / "config.yaml").exists(), time.monotonic()
        processes = start(["train", "--resume", str(out)] if begun else [*arguments, "--out", str(out)], ranks)
        if killed < kills:
            processes[0].join(random.uniform(0, longest))
        else:
            for process in processes:
                process.join()
        ended = [process.exitcode for process in processes]
        if ended == [0] * ranks:
            return killed, time.monotonic() - started
        assert not any(ended), "resuming failed"
        for process in processes:
            process.kill()
            process.join()
        killed += 1


def outcome(out: Path) -> dict[str, Any]:
    """All that a run leaves, but for the time it took."""
    files = {str(path.relative_to(out)): path for path in sorted(out.rglob("*")) if path.is_file()}
    found: dict[str, Any] = {}
    for name, path in files.items():
        if name.endswith("metrics.jsonl"):
            timeless = {"seconds": 0, "train_seconds": 0}
            found[name] = [json.loads(line) | timeless for line in path.read_text().splitlines()]
        elif name.endswith("result.json"):
            found[name] = json.loads(path.read_text()) | {"seconds": 0}
        elif name.endswith("state.json"):
            state = json.loads(path.read_text())
            found[name] = state | {"state": state["state"] | {"seconds": 0}}
        elif name.endswith((".safetensors", "training.pt", "config.yaml")):
            found[name] = path.read_bytes()
    return found


@pytest.mark.parametrize(
    ("kills", "ranks", "flags"),
    [
        (3, 1, ["--method", "fractrain"]),
        # Two phases, noise in every gradient, and a learning rate of its own at each step.
        pytest.param(20, 1, ["--method", "dfq", "--setting", "fine-tuning"], marks=pytest.mark.slow),
        pytest.param(20, 1, ["--method", "pfq"], marks=pytest.mark.slow),
        pytest.param(5, 2, ["--method", "fractrain"], marks=pytest.mark.slow),
    ],
)
def test_killed_and_resumed_training_ends_as_if_left_alone(
    kills: int, ranks: int, flags: list[str], tmp_path: Path
) -> None:
    arguments = [*RUN, *LOOP, *flags]
    first, whole = leave_alone(arguments, tmp_path / "whole", ranks)
    expected = outcome(tmp_path / "whole")
    assert len(expected["metrics.jsonl"]) == EPOCHS
    # From the start of the process to a few epochs after its first.
    longest = first + 3 * (whole - first) / EPOCHS
    killed, turn = 0, 0
    while killed < kills:
        out = tmp_path / f"killed-{turn}"
        more, seconds = kill_and_resume(arguments, out, ranks, kills - killed, longest)
        assert outcome(out) == expected
        killed, longest = killed + more, min(longest, seconds)  # a machine that others use too is slower at times
        turn += 1
