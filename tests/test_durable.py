"""What a full disk, a read-only folder or a file in its place tell the user."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fractrain_fx.config import FracConfig
from fractrain_fx.durable import require_file, require_folder, writing
from fractrain_fx.errors import RunError
from fractrain_fx.training import RunResult
from fractrain_fx.training.folder.checkpoint import Checkpoint, latest_checkpoint, save_checkpoint
from fractrain_fx.training.log.extremes import write_samples
from fractrain_fx.training.log.records import Start, keep_start


def test_a_folder_that_is_there_or_can_be_made_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path, tmp_path / "a" / "b", Path("runs/new"), Path(".")):
        require_folder(path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_place_of_a_folder_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "run"):
        with pytest.raises(RunError, match=rf"because {file} is a file|Not a directory"):
            require_folder(path)


def test_a_read_only_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(RunError, match=rf"because {tmp_path} is read-only"):
        require_folder(tmp_path / "run")


def test_a_file_that_cannot_be_written_is_told_before_the_work(tmp_path: Path) -> None:
    require_file(tmp_path / "new.json")
    with pytest.raises(RunError, match="is a folder: name a file in it"):
        require_file(tmp_path)
    with pytest.raises(RunError, match="its folder does not exist"):
        require_file(tmp_path / "none" / "new.json")
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="is a file"):
        require_file(tmp_path / "file" / "new.json")


def test_what_the_disk_says_is_in_the_message(tmp_path: Path) -> None:
    with (
        pytest.raises(RunError, match=r"x could not be written \(No space left on device\): make room"),
        writing(tmp_path / "x"),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write_result(folder: Path) -> None:
    costs: dict[str, Any] = {"mean_cp": 1.0, "mean_cp_total": 1.0, "total_macs": 1.0, "best_macs": 1.0}
    turns: dict[str, Any] = {"turning_points": (), "turning_steps": (), "uncounted": 0, "machines": ()}
    result = RunResult("a", "accuracy", 0.0, 0.0, 0, seconds=1.0, epochs=1, hardware={}, **costs, **turns)
    result.to_json(folder / "result.json")


WRITERS: dict[str, Callable[[Path], None]] = {
    "result.json": write_result,
    "samples.json": lambda folder: write_samples([], folder),
    "config.yaml": lambda folder: FracConfig().to_yaml(folder / "config.yaml"),
    "starts.jsonl": lambda folder: keep_start(folder, Start.now([], epoch=0, device="cpu", processes=1)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_file_of_a_run_that_cannot_be_written_is_named(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path)
    assert (tmp_path / name).is_file()
    with pytest.raises(RunError, match=rf"{name} could not be written \(No such file or directory\): make room"):
        WRITERS[name](tmp_path / "gone")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), RuntimeError("unexpected pos 1 vs 2")])
def test_a_full_disk_keeps_the_checkpoint_before_it(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(2, 2)
    first = save_checkpoint(tmp_path, model, Checkpoint(1, {}, {}, {}))

    def full(*_: Any) -> None:
        raise error

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(RunError, match="checkpoint-0002 could not be written"):
        save_checkpoint(tmp_path, model, Checkpoint(2, {}, {}, {}))
    assert latest_checkpoint(tmp_path) == first and [each.name for each in tmp_path.iterdir()] == [first.name]
