"""Timings on disk: for the same kind and machine only, of several processes, and never in the way."""

from __future__ import annotations

import json
import logging
import multiprocessing
from pathlib import Path

import pytest
import torch
from torch import nn

from fractrain_fx import FracConfig, RunConfig, fractrainify
from fractrain_fx.execution.codes import kept
from fractrain_fx.execution.codes.kept import VARIABLE, keep, recall
from fractrain_fx.execution.codes.timing import Tuner
from tests.products import needs_kernels


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "timings"))
    return tmp_path / "timings"


def only_file(folder: Path) -> Path:
    (file,) = folder.glob("int8-*.json")
    return file


def test_a_later_run_takes_the_same_form_without_timing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    runs: list[bool] = []
    chosen = Tuner().int8("kind", "op", lambda int8: runs.append(int8))
    assert len(runs) == 8
    with caplog.at_level(logging.INFO):
        assert Tuner().int8("kind", "op", lambda int8: runs.append(int8)) == chosen
    assert len(runs) == 8 and "in an earlier run" in caplog.text
    Tuner().int8("other kind", "op", lambda int8: runs.append(int8))
    assert len(runs) == 16 and len(json.loads(only_file(folder).read_text())["timings"]) == 2


def test_another_machine_thread_count_version_or_kernel_has_its_own_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep("kind", (1.0, 2.0))
    assert recall("kind") == (1.0, 2.0)
    for name, made in (("processor", "another"), ("_version", "0.2"), ("_kernels", "other source")):
        with monkeypatch.context() as patch:
            patch.setattr(kept, name, lambda made=made: made)
            assert recall("kind") is None
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 64)
        assert recall("kind") is None
        keep("kind", (3.0, 4.0))
    assert recall("kind") == (1.0, 2.0) and len(list(folder.glob("int8-*.json"))) == 2


@pytest.mark.parametrize("text", ["{", "[]", '{"timings": {"kind": [1]}}', '{"timings": {"kind": ["a", "b"]}}'])
def test_a_broken_file_is_said_and_replaced(folder: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    keep("kind", (1.0, 2.0))
    only_file(folder).write_text(text)
    assert recall("kind") is None and "holds no timings" in caplog.text
    keep("kind", (5.0, 6.0))
    assert recall("kind") == (5.0, 6.0)


def test_a_folder_that_cannot_be_written_to_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file"))
    with caplog.at_level(logging.INFO):
        keep("kind", (1.0, 2.0))
    assert "a timing was not kept" in caplog.text


def test_off_reads_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(VARIABLE, "off")
    keep("kind", (1.0, 2.0))
    assert recall("kind") is None and not list(tmp_path.iterdir())
    monkeypatch.delenv(VARIABLE)
    keep("kind", (1.0, 2.0))
    assert only_file(tmp_path / "fractrain_fx" / "timings")


def test_processes_that_write_at_once_lose_nothing(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(number,)) for number in range(3)]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
    assert all(recall(f"{number} {index}") for number in range(3) for index in range(5))


def _write(number: int) -> None:
    for index in range(5):
        keep(f"{number} {index}", (1.0, 2.0))


@needs_kernels
def test_the_kinds_of_a_model_are_found_again(folder: Path) -> None:
    x = torch.randn(64, 16)
    before: dict[str, list[float]] = {}
    for _ in range(2):
        net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
        config = FracConfig(method="static", run=RunConfig(backend="codes"))
        model = fractrainify(net, config=config, example_inputs=(x[:2],), check=False)
        model(x).sum().backward()
        held = json.loads(only_file(folder).read_text())["timings"]
        assert held and not any(" at 0x" in kind for kind in held)
        assert not before or held == before  # the second run timed nothing
        before = held
