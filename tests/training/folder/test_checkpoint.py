"""Checkpoints are whole or absent, are another configuration's or this one's, and run nothing."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fractrain_fx.errors import RunError
from fractrain_fx.model.saved.folder import read_weights
from fractrain_fx.training.folder import checkpoint as module
from fractrain_fx.training.folder.checkpoint import (
    Checkpoint,
    latest_checkpoint,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from tests.training.folder.rewritten import rewrite

CONFIG = {"lr": 0.1, "options": ["FW-0/BW-0"], "seed": None}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight


def saved(epoch: int) -> Checkpoint:
    rows = [{"epoch": number, "stage": 1, "level": "", "options": {}} for number in range(1, epoch + 1)]
    steering: dict[str, Any] = {"cost_term": {}, "clock": {"steps": 0, "tokens": 0}}
    engine = {"stage": 1, "schedule": {}, "ledger": {"macs": 1, "epochs": rows}} | steering
    state = {"engine": engine, "seconds": 1.0, "value": None, "best": None}
    tensors = {
        "optimizer": {"state": {0: {"step": torch.tensor(3)}}, "param_groups": []},
        "scheduler": {"last_epoch": 1, "_last_lr": [0.1]},
        "scaler": None,
        "random": [{"torch": torch.get_rng_state(), "device": None, "python": (3,), "numpy": ("MT19937",)}],
    }
    return Checkpoint(epoch, CONFIG, state, tensors)


def test_weights_state_and_tensors_come_back(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    save_checkpoint(tmp_path, model, saved(2))
    loaded = load_checkpoint(tmp_path, other, CONFIG)
    assert torch.equal(other.embedding.weight, model.embedding.weight)
    assert other.head.weight is other.embedding.weight
    assert loaded.epoch == 2 and loaded.state == saved(2).state
    assert loaded.tensors["optimizer"]["state"][0]["step"] == 3


def test_a_checkpoint_of_a_newer_schema_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VERSION", 2)
    folder = save_checkpoint(tmp_path, Tied(), saved(1))
    assert json.loads((folder / "state.json").read_text())["version"] == 2
    monkeypatch.undo()
    with pytest.raises(RunError, match="newer version"):
        load_checkpoint(tmp_path, Tied(), CONFIG)


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, Tied(), saved(1))
    newer, read = Tied(), read_weights

    def later(path: Path) -> dict[str, torch.Tensor]:
        monkeypatch.undo()
        save_checkpoint(tmp_path, newer, saved(2))  # as another process does at the end of an epoch
        return read(path)

    monkeypatch.setattr(module, "read_weights", later)
    found, model = newest_checkpoint(tmp_path), Tied()
    found.fill(model)
    assert found.epoch == 2 and torch.equal(model.embedding.weight, newer.embedding.weight)


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


def without(name: str) -> Callable[[Any], Any]:
    return lambda content: {key: value for key, value in content.items() if key != name}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("sha256.json", lambda _: {}, "sha256.json has no entry 'model.safetensors'"),
        ("sha256.json", lambda _: [], "sha256.json is list and not dict"),
        ("sha256.json", without("training.pt"), "sha256.json has no entry 'training.pt'"),
        ("state.json", lambda state: state | {"epoch": 10**9}, "state.json is of epoch 1000000000"),
        ("state.json", lambda state: state | {"epoch": True}, "state.json: epoch is bool and not int"),
        ("state.json", lambda state: state | {"epoch": "1"}, "state.json: epoch is str and not int"),
        ("state.json", without("state"), "state.json has no entry 'state'"),
        ("state.json", lambda state: state | {"state": without("engine")(state["state"])}, "no entry 'engine'"),
        ("state.json", lambda state: state | {"state": state["state"] | {"best": {"epoch": 1}}}, "best has no entry"),
        ("training.pt", lambda _: {}, "training.pt has no entry 'optimizer'"),
        ("training.pt", lambda tensors: tensors | {"optimizer": {}}, "training.pt: optimizer has no entry 'state'"),
        ("training.pt", lambda tensors: tensors | {"random": [{}]}, r"training.pt: random\[0\] has no entry 'torch'"),
        ("training.pt", lambda _: [1], "training.pt is list and not dict"),
    ],
)
def test_content_of_another_form_is_refused_with_its_file(
    name: str, change: Callable[[Any], Any], message: str, tmp_path: Path
) -> None:
    rewrite(save_checkpoint(tmp_path, Tied(), saved(1)) / name, change)
    other = Tied()
    before = other.embedding.weight.clone()
    with pytest.raises(RunError, match=f"checkpoint-0001 is damaged .*{message}"):
        load_checkpoint(tmp_path, other, CONFIG)
    assert torch.equal(other.embedding.weight, before)
