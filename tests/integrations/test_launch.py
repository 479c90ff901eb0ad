"""Two processes started by ``accelerate launch``: one run, whichever process is asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


def test_two_processes_fine_tune_bert_as_one_run_and_resume_it(tmp_path: Path) -> None:
    # accelerate's launcher starts several processes for GPUs only (on CPUs it wants MPI); they are told to use CPUs.
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    plain = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    script = ["-m", "tests.integrations.launched", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [*launch, *plain, *script], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in (0, 1))

    whole = first["whole"]
    assert second["whole"]["ledger"] == whole["ledger"] and second["whole"]["weights"] == whole["weights"]
    assert [(row["stage"], row["samples"]) for row in whole["ledger"]["epochs"]] == [(0, 48), (1, 48)]
    for entry in whole["logs"]:
        assert entry["loss"] == pytest.approx(entry["task_loss"] + entry["cost_loss"], rel=1e-4)
    # The ledger of a run that went on in the middle of an epoch has the samples of both processes from before.
    for ours in (first, second):
        assert [row["samples"] for row in ours["resumed"]["ledger"]["epochs"]] == [48, 48]
        assert ours["resumed"]["ledger"]["epochs"][0]["cp"] == pytest.approx(whole["ledger"]["epochs"][0]["cp"])
        assert ours["resumed"]["weights"] == pytest.approx(whole["weights"])
