"""A run's folder belongs to one process at a time, and the others are told which."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import pytest

from fractrain_fx.errors import RunError
from fractrain_fx.training.folder.held import hold, hold_new
from tests.training.started import another_process


@pytest.mark.long
def test_the_second_process_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    with another_process(tmp_path / "run") as first:
        with pytest.raises(RunError) as refused:
            hold(tmp_path / "run")
        text = str(refused.value)
        assert f"process {first.pid} on {platform.node()}, since 20" in text and "another folder" in text
        assert str(tmp_path / "run") in text.partition("(")[2], "the command that was started"
    hold(tmp_path / "run").release()


@pytest.mark.long
def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    with another_process(tmp_path) as process:
        process.kill()
        process.wait()
        held = hold(tmp_path)
    about = json.loads((tmp_path / ".holder.json").read_text())
    assert about["pid"] == os.getpid()
    held.release()


@pytest.mark.long
def test_a_process_may_hold_its_own_folder_again_and_others_wait_for_the_last_release(tmp_path: Path) -> None:
    first, second = hold(tmp_path), hold(tmp_path)
    first.release()
    first.release()  # counts once
    with pytest.raises(AssertionError), another_process(tmp_path):
        pass
    second.release()
    with another_process(tmp_path):
        pass


@pytest.mark.long
def test_a_folder_is_released_with_the_object_that_holds_it(tmp_path: Path) -> None:
    held = hold(tmp_path)
    del held
    with another_process(tmp_path):
        pass


def test_new_folders_are_numbered_and_never_shared(tmp_path: Path) -> None:
    (tmp_path / "runs" / "pfq-2").mkdir(parents=True)
    names = [hold_new(tmp_path / "runs", "pfq").path.name for _ in range(3)]
    assert names == ["pfq-1", "pfq-3", "pfq-4"]


def test_discarding_removes_what_was_made_and_nothing_else(tmp_path: Path) -> None:
    hold_new(tmp_path / "a" / "runs", "pfq").discard()
    hold(tmp_path / "b" / "run").discard()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    hold(tmp_path / "mine").discard()
    written = hold(tmp_path / "run")
    (written.path / "config.yaml").touch()
    written.discard()
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "mine",
        "mine/file",
        "run",
        "run/config.yaml",
    ]
    hold(tmp_path / "run").release()
