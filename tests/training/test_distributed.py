"""Two processes through accelerate: the same stages, cost and samples as one process with the whole batch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from fractrain_fx.cli import main
from fractrain_fx.training.folder.held import hold
from tests.training.tiny import Plain

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
LOOP = ["--subset", "128", "--set", "test_subset=101", "--image-size", "8", "--device", "cpu"]


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
    flags = ["--method", "float", "--epochs", "3", "--set", "accumulate=2"]
    two = train(tmp_path / "two", "plain", *flags, processes=2)
    one = train(tmp_path / "one", "plain", *flags)
    for ours, theirs in zip(two, one, strict=True):
        # Sums of a batch are taken in another order, and what that makes grows with each step.
        for name in ("loss", "test_loss"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5)
        assert ours["test_accuracy"] == pytest.approx(theirs["test_accuracy"])


def test_two_processes_take_the_same_stages_and_resume(tmp_path: Path) -> None:
    # Sharp indicator: each epoch from the fifth on is a turning point, if all agree that it is.
    flags = [
        "--method",
        "fractrain",
        "--schedule",
        "auto",
        "--epochs",
        "7",
        "--set",
        "schedule.epsilon=10",
        "--set",
        "schedule.alpha=1",
        "--set",
        "gate.beta=0.05",
    ]
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


def together(arguments: list[str]) -> list[subprocess.Popen[str]]:
    """Two processes without torchrun, which would end one when the other dies."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-m", "fractrain_fx", *arguments]
    return [
        subprocess.Popen(
            command,
            env={**os.environ, **own, "WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]


@pytest.mark.slow
def test_a_sharded_run_says_that_a_process_was_killed_and_goes_on(tmp_path: Path) -> None:
    flags = ["--method", "fractrain", "--epochs", "6", "--schedule", "manual", "--set", "gate.beta=0.05"]
    flags += ["--set", "accumulate=2", "--lr", "0.05"]
    model = ["--model", f"{ROOT}/tests/training/tiny.py:plain", "--batch-size", "16"]
    out = tmp_path / "sharded"
    processes = together(["train", *model, *LOOP, *flags, "--set", "shard=true", "--out", str(out)])
    while not (out / "metrics.jsonl").exists() or len((out / "metrics.jsonl").read_text().splitlines()) < 2:
        assert processes[0].poll() is None, processes[0].communicate()[1]
        time.sleep(0.01)
    processes[1].kill()
    said = processes[0].communicate(timeout=300)[1]
    processes[1].communicate()
    assert processes[0].returncode == 2
    assert "another process of this run ended" in said and f"The last good checkpoint is {out}" in said
    assert "Traceback" not in said

    run_together(["train", "--resume", str(out)], 2)
    sharded = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [(row["epoch"], row["samples"]) for row in sharded] == [(epoch, 128) for epoch in range(1, 7)]
    assert sharded[0]["stage"] == 0 and sharded[-1]["stage"] > 0
    # The checkpoint holds whole weights, under the names of the model.
    saved = load_file(next(out.glob("checkpoint-*")) / "model.safetensors")
    assert {name: x.shape for name, x in saved.items() if not name.startswith("frac.")} == {
        name: x.shape for name, x in Plain().state_dict().items()
    }


LEAVES = """
import sys
from pathlib import Path

import torch.distributed as dist

from fractrain_fx.cli import main
from fractrain_fx.training.folder.held import hold

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


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are told by name under /proc")
def test_no_thread_of_the_group_is_left_to_shut_python_down_with(tmp_path: Path) -> None:
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES)
    model = ["--model", f"{ROOT}/tests/training/tiny.py:plain", "--batch-size", "16"]
    command = ["train", *model, *LOOP, "--method", "fractrain", "--epochs", "1", "--out", str(tmp_path / "run")]
    assert run_together(command, 2, program=[str(script)]).split("\n").count("left") == 2


def test_the_processes_of_a_run_share_a_new_folder_and_are_refused_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = ["--model", f"{ROOT}/tests/training/tiny.py:plain", "--batch-size", "16"]
    command = ["train", *model, *LOOP, "--method", "static", "--epochs", "1"]
    said = run_together(command, 2)
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"run folder: runs/{folder.name}" in said and (folder / "result.json").exists()

    with hold(folder):
        processes = together(["train", "--resume", str(folder)])
        errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    for error in errors:
        assert f"is written to by another run: process {os.getpid()}" in error and "Traceback" not in error
