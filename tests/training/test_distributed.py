"""Two processes through accelerate: the same stages, cost and samples as one process with the whole batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fractrain_fx.cli import main

ROOT = Path(__file__).parents[2]


RUN = ["train", "--model", f"{ROOT}/tests/training/tiny.py:net", "--image-size", "8", "--subset", "128"]
LOOP = ["--epochs", "2", "--schedule", "manual", "--device", "cpu"]


def rows(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_two_processes_train_like_one(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "fractrain_fx", *RUN, *LOOP, "--batch-size", "16", "--out", str(tmp_path / "two")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, cwd=tmp_path, capture_output=True)
    assert main([*RUN, *LOOP, "--batch-size", "32", "--out", str(tmp_path / "one")]) == 0
    two, one = rows(tmp_path / "two"), rows(tmp_path / "one")
    for ours, theirs in zip(two, one, strict=True):
        for name in ("epoch", "stage", "samples", "options"):
            assert ours[name] == theirs[name]
        assert ours["cp"] == pytest.approx(theirs["cp"])
        # Batch norm and ranges see half a batch in each process.
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.02)
