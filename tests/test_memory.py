"""Memory that was freed stays with a process that trains on a CPU."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from fractrain_fx.memory import keep_freed_memory, return_freed_memory
from tests.models import some_long

_KEPT = {
    "by call": "from fractrain_fx import keep_freed_memory; assert keep_freed_memory()",
    "in training": (
        "from fractrain_fx.training.processes import make_accelerator; from fractrain_fx.training import TrainSettings;"
        "make_accelerator(TrainSettings(device='cpu'))"
    ),
    "in benchmarks": "from benchmarks.steady import steady; steady()",
    "not": "import fractrain_fx.training",
}
_MEASURE = """
import torch
from pathlib import Path
def pages():
    return int(Path("/proc/self/statm").read_text().split()[1])
tensors = [torch.ones(1 << 22) for _ in range(20)]
before = pages()
del tensors[:]
print((before - pages()) * 4096 // 2**20)
"""
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="sets glibc's allocator")


@pytest.mark.long
@glibc
@pytest.mark.parametrize("how", some_long(_KEPT, "in training", "in benchmarks"))
def test_freed_memory_is_kept_by_call_in_training_and_in_benchmarks_and_not_by_an_import(how: str) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    code = f"{_KEPT[how]}\n{_MEASURE}"
    returned = int(subprocess.check_output([sys.executable, "-c", code], env=clean).split()[-1])
    assert returned > 200 if how == "not" else returned < 30, "of 320 MiB"


@glibc
def test_freed_memory_between_blocks_in_use_is_returned_on_request() -> None:
    def pages() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    blocks = [bytearray(100_000) for _ in range(400)]
    pinned, before = blocks.pop(), pages()
    blocks.clear()
    return_freed_memory()
    assert (before - pages()) * os.sysconf("SC_PAGE_SIZE") > 30e6, "of 40 MB"
    assert len(pinned) == 100_000


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_settings_of_the_environment_are_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    assert not keep_freed_memory()


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_freed_memory()
