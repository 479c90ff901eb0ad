"""Two processes through accelerate: the same stages, cost and samples as one process with the whole batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fractrain_fx.cli import main

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
LOOP = ["--subset", "128", "--test-subset", "101", "--image-size", "8", "--device", "cpu"]


def train(out: Path, function: str, *flags: str, processes: int = 1) -> list[dict[str, Any]]:
    """Train in batches of 32, shared out to the processes; give the epochs' metrics."""
    model = ["--model", f"{ROOT}/tests/training/tiny.py:{function}", "--batch-size", str(32 // processes)]
    command = ["train", *model, *LOOP, *flags, "--out", str(out)]
    if processes == 1:
        assert main(command) == 0
    else:
        run_together(command, processes)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def run_together(command: list[str], processes: int, *, program: Sequence[str] = ("-m", "fractrain_fx")) -> str:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launcher, *program, *command], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_processes_compute_what_one_does(tmp_path: Path) -> None:
    flags = ["--method", "float", "--epochs", "3", "--accumulate", "2"]
    two = train(tmp_path / "two", "plain", *flags, processes=2)
    one = train(tmp_path / "one", "plain", *flags)
    for ours, theirs in zip(two, one, strict=True):
        # Sums of a batch are taken in another order, and what that makes grows with each step.
        for name in ("loss", "test_loss"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5)
        assert ours["test_accuracy"] == pytest.approx(theirs["test_accuracy"])


def test_two_processes_take_the_same_stages_and_resume(tmp_path: Path) -> None:
    # Sharp indicator: each epoch from the fifth on is a turning point, if all agree that it is.
    flags = ["--method", "fractrain", "--epochs", "7", "--epsilon", "10", "--alpha", "1", "--gate.beta", "0.05"]
    two = train(tmp_path / "two", "plain", *flags, processes=2)
    one = train(tmp_path / "one", "plain", *flags)
    assert [row["stage"] for row in one] == [0, 0, 0, 0, 0, 1, 1]
    for ours, theirs in zip(two, one, strict=True):
        for name in ("epoch", "stage", "level", "samples"):
            assert ours[name] == theirs[name]
        # Each process has its own ranges, as it has its own batch statistics, and its own rounding noise.
        assert ours["cp"] == pytest.approx(theirs["cp"], rel=0.1)
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.02)
    # Going on in one process would mean other batches, other noise and another learning rate.
    assert main(["train", "--resume", str(tmp_path / "two")]) == 2


LEAVES = """
import sys
from pathlib import Path

import torch.distributed as dist

from fractrain_fx.cli import main

opened = []
leave = dist.destroy_process_group

def threads():
    return {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}

def watched():
    opened.append(any("gloo" in name for name in threads()))
    leave()

dist.destroy_process_group = watched
assert main(sys.argv[1:]) == 0
assert opened == [True]
assert not dist.is_initialized()
assert not any("gloo" in name for name in threads()), threads()
print("left")
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are told by name under /proc")
def test_no_thread_of_the_group_is_left_to_shut_python_down_with(tmp_path: Path) -> None:
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES)
    model = ["--model", f"{ROOT}/tests/training/tiny.py:plain", "--batch-size", "16"]
    command = ["train", *model, *LOOP, "--method", "fractrain", "--epochs", "1", "--out", str(tmp_path / "run")]
    assert run_together(command, 2, program=[str(script)]).split("\n").count("left") == 2
