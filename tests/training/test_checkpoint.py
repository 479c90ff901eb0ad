"""Checkpoints are whole or absent."""

from pathlib import Path

import pytest
import torch
from torch import nn

from fractrain_fx.errors import RunError
from fractrain_fx.training import checkpoint as module
from fractrain_fx.training.checkpoint import Checkpoint, latest_checkpoint, load_checkpoint, save_checkpoint


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight


def saved(epoch: int) -> Checkpoint:
    return Checkpoint(epoch, {"engine": {"stage": 1}}, {"optimizer": {"step": torch.tensor(3)}})


def test_weights_state_and_tensors_come_back(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    save_checkpoint(tmp_path, model, saved(2))
    loaded = load_checkpoint(tmp_path, other)
    assert torch.equal(other.embedding.weight, model.embedding.weight)
    assert other.head.weight is other.embedding.weight
    assert loaded.epoch == 2 and loaded.state == {"engine": {"stage": 1}}
    assert loaded.tensors["optimizer"]["step"] == 3


def test_only_the_newest_is_kept(tmp_path: Path) -> None:
    for epoch in (9, 10):
        save_checkpoint(tmp_path, Tied(), saved(epoch))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-0010"]


def test_an_interrupted_save_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tied()
    save_checkpoint(tmp_path, model, saved(1))

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module.torch, "save", interrupt)
        save_checkpoint(tmp_path, model, saved(2))
    folder = latest_checkpoint(tmp_path)
    assert folder is not None and folder.name == "checkpoint-0001"
    assert load_checkpoint(tmp_path, Tied()).epoch == 1
    save_checkpoint(tmp_path, model, saved(2))
    assert load_checkpoint(tmp_path, Tied()).epoch == 2


def test_missing_damaged_and_foreign_checkpoints_are_explained(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no checkpoint"):
        load_checkpoint(tmp_path, Tied())
    folder = save_checkpoint(tmp_path, Tied(), saved(1))
    with pytest.raises(RunError, match="does not fit this model"):
        load_checkpoint(tmp_path, nn.Linear(2, 2))
    (folder / "training.pt").write_bytes(b"nothing")
    with pytest.raises(RunError, match="damaged"):
        load_checkpoint(tmp_path, Tied())
