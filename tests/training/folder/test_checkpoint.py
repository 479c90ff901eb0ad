"""Checkpoints are whole or absent, are another configuration's or this one's, and run nothing."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from fractrain_fx.errors import RunError
from fractrain_fx.training.folder import checkpoint as module
from fractrain_fx.training.folder.checkpoint import Checkpoint, latest_checkpoint, load_checkpoint, save_checkpoint

CONFIG = {"lr": 0.1, "options": ["FW-0/BW-0"], "seed": None}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight


def saved(epoch: int) -> Checkpoint:
    return Checkpoint(epoch, CONFIG, {"engine": {"stage": 1}}, {"optimizer": {"step": torch.tensor(3)}})


def test_weights_state_and_tensors_come_back(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    save_checkpoint(tmp_path, model, saved(2))
    loaded = load_checkpoint(tmp_path, other, CONFIG)
    assert torch.equal(other.embedding.weight, model.embedding.weight)
    assert other.head.weight is other.embedding.weight
    assert loaded.epoch == 2 and loaded.state == {"engine": {"stage": 1}}
    assert loaded.tensors["optimizer"]["step"] == 3


def test_only_the_newest_is_kept(tmp_path: Path) -> None:
    for epoch in (9998, 9999, 10000):
        save_checkpoint(tmp_path, Tied(), saved(epoch))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-10000"]


@pytest.mark.parametrize("step", ["save_model", "torch.save", "_digest", "sync"])
def test_an_interrupted_save_leaves_the_one_before(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tied()
    save_checkpoint(tmp_path, model, saved(1))

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(f"fractrain_fx.training.folder.checkpoint.{step}", interrupt)
        save_checkpoint(tmp_path, model, saved(2))
    folder = latest_checkpoint(tmp_path)
    assert folder is not None and folder.name == "checkpoint-0001"
    assert load_checkpoint(tmp_path, Tied(), CONFIG).epoch == 1
    save_checkpoint(tmp_path, model, saved(2))
    assert load_checkpoint(tmp_path, Tied(), CONFIG).epoch == 2


def test_a_checkpoint_that_is_there_is_never_replaced(tmp_path: Path) -> None:
    # Between removing the old and naming the new one there would be none.
    save_checkpoint(tmp_path, Tied(), saved(1))
    with pytest.raises(RunError, match="already exists"):
        save_checkpoint(tmp_path, Tied(), saved(1))


def test_a_missing_checkpoint_and_another_model_are_explained(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no checkpoint"):
        load_checkpoint(tmp_path, Tied(), CONFIG)
    save_checkpoint(tmp_path, Tied(), saved(1))
    with pytest.raises(RunError, match="does not fit this model"):
        load_checkpoint(tmp_path, nn.Linear(2, 2), CONFIG)


@pytest.mark.parametrize("name", ["model.safetensors", "training.pt", "state.json", "sha256.json"])
@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_a_damaged_checkpoint_is_refused_before_anything_is_loaded(name: str, damage: str, tmp_path: Path) -> None:
    file = save_checkpoint(tmp_path, Tied(), saved(1)) / name
    content = file.read_bytes()
    middle = len(content) // 2
    if damage == "gone":
        file.unlink()
    else:
        changed = bytes([content[middle] ^ 1]) + content[middle + 1 :]
        file.write_bytes(content[:middle] + (b"" if damage == "cut" else changed))
    other = Tied()
    before = other.embedding.weight.clone()
    with pytest.raises(RunError, match=r"checkpoint-0001 is damaged"):
        load_checkpoint(tmp_path, other, CONFIG)
    assert torch.equal(other.embedding.weight, before)


def test_another_configuration_is_refused_with_what_differs(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, Tied(), saved(1))
    with pytest.raises(RunError, match=r"another configuration: lr was 0\.1 and is 0\.2; seed was None and is 3\."):
        load_checkpoint(tmp_path, Tied(), CONFIG | {"lr": 0.2, "seed": 3})


class Command:
    def __init__(self, text: str) -> None:
        self.text = text

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (self.text,)


def test_a_checkpoint_with_code_in_it_is_refused_and_not_run(tmp_path: Path) -> None:
    trace = tmp_path / "it-ran"
    folder = save_checkpoint(tmp_path, Tied(), saved(1))
    for write in (
        lambda path: torch.save({"optimizer": Command(f"touch {trace}")}, path),
        lambda path: path.write_bytes(pickle.dumps(Command(f"touch {trace}"))),
    ):
        write(folder / "training.pt")
        sums = json.loads((folder / "sha256.json").read_text())
        sums["training.pt"] = module._digest(folder / "training.pt")
        (folder / "sha256.json").write_text(json.dumps(sums))
        with pytest.raises(RunError, match="damaged"):
            load_checkpoint(tmp_path, Tied(), CONFIG)
        assert not trace.exists()
