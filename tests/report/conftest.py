"""Runs that are trained or made once for all tests of the report."""

from __future__ import annotations

from pathlib import Path

import pytest

from fractrain_fx.cli import main
from tests.report.made import make_run

TINY = Path(__file__).parents[1] / "training" / "tiny.py"
QUICK = ["--model", f"{TINY}:net", "--image-size", "8", "--subset", "64", "--batch-size", "32", "--device", "cpu"]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of three methods, each trained for real."""
    folder = tmp_path_factory.mktemp("trained")
    for method in ("fractrain", "pfq", "static"):
        flags = [
            "--method",
            method,
            "--as",
            "paper",
            "--schedule",
            "manual",
            "--epochs",
            "4",
            "--out",
            str(folder / method),
        ]
        assert main(["train", *QUICK, *flags]) == 0
    return folder


@pytest.fixture(scope="session")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 160 epochs and 36 blocks."""
    folder = tmp_path_factory.mktemp("long") / "resnet74"
    make_run(folder)
    return folder
