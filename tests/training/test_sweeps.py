"""Sweeps of runs that start at nearly the same time: each folder that survives is that of one run, and goes on."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import yaml

from fractrain_fx.training.folder.checkpoint import latest_checkpoint
from tests.training.started import RUN, start

EPOCHS = 3
RATES = ("0.01", "0.02", "0.03", "0.04", "0.05")
LOOP = ["--epochs", str(EPOCHS), "--batch-size", "32", "--method", "static", "--device", "cpu"]
LOOP += ["--lr-schedule", "constant"]  # so that every line of the metrics names the run's own rate


def sweep(folder: Path, *, shared: bool, latest: float) -> list[int | None]:
    """Runs with different learning rates, started 0 to ``latest`` seconds apart; some are killed. Gives exit codes."""
    os.chdir(folder)  # which the processes inherit
    runs: list[BaseProcess] = []
    for rate in RATES:
        runs += start([*RUN, *LOOP, "--lr", rate, *(["--out", "run"] if shared else [])], 1)
        time.sleep(random.uniform(0, latest))
    time.sleep(random.uniform(0, 2))
    random.choice(runs).kill()
    for run in runs:
        run.join()
    return [run.exitcode for run in runs]


def rates(run: Path) -> Iterator[tuple[str, float]]:
    """Every learning rate that a run's folder names, with the file."""
    yield "config.yaml", yaml.safe_load((run / "config.yaml").read_text())["lr"]
    for line in (run / "starts.jsonl").read_text().splitlines():
        _, given, rate = json.loads(line)["command"].partition("--lr ")
        if given:
            yield "starts.jsonl", float(rate.split()[0])
    metrics = run / "metrics.jsonl"
    for line in metrics.read_text().splitlines() if metrics.exists() else ():
        yield "metrics.jsonl", json.loads(line)["lr"]
    if (newest := latest_checkpoint(run)) is not None:
        yield newest.name, json.loads((newest / "state.json").read_text())["config"]["lr"]


@pytest.mark.parametrize("shared", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("sweeps", "latest"),
    [pytest.param(2, 0.2, marks=pytest.mark.long), pytest.param(20, 5.0, marks=pytest.mark.slow)],
)
def test_runs_that_start_together_keep_their_folders_apart(
    sweeps: int, latest: float, shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    survivors = 0
    for number in range(sweeps):
        folder = tmp_path / str(number)
        folder.mkdir()
        codes = sweep(folder, shared=shared, latest=random.choice((0, latest)))
        assert set(codes) <= ({0, 2, -9} if shared else {0, -9}), codes
        runs = [
            run for run in (folder.glob("run") if shared else folder.glob("runs/*")) if any(run.glob("config.yaml"))
        ]
        assert len(runs) <= 1 if shared else len(runs) >= codes.count(0)
        for run in runs:
            found = list(rates(run))
            assert len({rate for _, rate in found}) == 1, (run, found)
            (resumed,) = start(["train", "--resume", str(run)], 1)
            resumed.join()
            assert resumed.exitcode == 0, run
            assert len((run / "metrics.jsonl").read_text().splitlines()) == EPOCHS
            assert {rate for _, rate in rates(run)} == {found[0][1]}, (run, found)
            survivors += 1
    print(f"{survivors} folders of {sweeps} sweeps with {'a shared' if shared else 'no'} --out are each of one run")
