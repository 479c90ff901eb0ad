"""Threads are tied to cores where a benchmark is the program, and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.steady import all_cores, steady

_PROGRAMS: tuple[str, ...] = ("compared_calls", "convolutions", "linears", "profile", "skipping", "watching")
_PROGRAMS += ("step.__main__", "time_to_loss.__main__")


@pytest.mark.long
def test_importing_benchmarks_ties_no_process_to_a_core() -> None:
    """A library that loads OpenMP later would tie it: once all workers of the test suite shared the first core."""
    imports = ", ".join(f"benchmarks.{name}" for name in _PROGRAMS)
    code = f"import os, {imports}; print(os.environ.get('OMP_PROC_BIND'))"
    unbound = {name: value for name, value in os.environ.items() if not name.startswith("OMP_P")}
    found = subprocess.run([sys.executable, "-c", code], env=unbound, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "None"


@pytest.mark.parametrize("name", _PROGRAMS)
def test_programs_bind_before_torch_is_loaded(name: str) -> None:
    code = Path("benchmarks", *name.split(".")).with_suffix(".py").read_text(encoding="utf-8")
    assert 0 < code.index('if __name__ == "__main__":\n    steady()') < code.index("import torch")


def test_what_is_set_already_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("OMP_PROC_BIND", "OMP_PLACES", "TORCHINDUCTOR_COMPILE_THREADS", "HF_HUB_OFFLINE", "FRACTRAIN_FX_TIMINGS")
    for name in names:
        monkeypatch.setenv(name, "mine")
    steady()
    assert {os.environ[name] for name in names} == {"mine"}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity") or os.cpu_count() == 1, reason="nothing to tie a thread to")
def test_processes_of_a_first_step_may_use_all_cores() -> None:
    """Those of torch's compiler once shared the core of the thread that started them, which took a third longer."""
    count = "import os; print(len(os.sched_getaffinity(0)))"
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        with all_cores():
            child = subprocess.run([sys.executable, "-c", count], capture_output=True, text=True, check=True)
        assert os.sched_getaffinity(0) == {min(before)}
    finally:
        os.sched_setaffinity(0, before)
    assert int(child.stdout) == len(before)
