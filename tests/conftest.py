"""One thread, no network, and the same random numbers in every test."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["FRACTRAIN_FX_TIMINGS"] = "off"  # no test reads or writes the user's cache
os.environ.setdefault("FRACTRAIN_BACKEND", "plain")  # whether or not the kernels were built on this machine
os.environ.pop("COLUMNS", None)  # pytest's workers set it, and tables obey it

import numpy as np
import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

settings.register_profile("tests", deadline=None, max_examples=30)  # others in each run, and failures are kept
settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate", action="store_true", help="write the golden files anew instead of comparing")


def pytest_collectstart() -> None:
    """Numbers that a test file draws as it is imported do not depend on the files before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _without_waiting_for_the_disk() -> Iterator[None]:
    """No test outlives a loss of power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _plain_attention() -> Iterator[None]:
    """Torch's own attention modules in evaluation as they compute in training: fused, they differ in the last bits."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(enabled)


@pytest.fixture(autouse=True)
def _without_compiled_code() -> Iterator[None]:
    """What one test compiled is gone in the next: torch stops compiling code that was compiled eight times."""
    yield
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and any(dynamo.utils.counters.values()):
        dynamo.reset()
        dynamo.utils.counters.clear()
