"""Plain text and WikiText-103: words, the vocabulary of the training text, and clear refusals."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fractrain_fx.errors import DataError
from fractrain_fx.training.data import load_dataset
from tests.training.data.layouts import tensors

TRAIN = "the cat sat\non the mat\n\nthe cat\n"
TEST = "the dog sat\non\n"


def write(folder: Path, train: str = TRAIN, test: str = TEST) -> Path:
    (folder / "wiki.train.tokens").write_text(train)
    (folder / "wiki.test.tokens").write_text(test)
    return folder


def test_words_are_numbered_as_they_first_appear(tmp_path: Path) -> None:
    data = load_dataset("text", data_dir=write(tmp_path), block_length=3)
    # <unk> the cat sat <eos> on mat
    assert data.classes == 7
    assert tensors(data.train)[0].tolist() == [[1, 2, 3], [4, 5, 1], [6, 4, 4]]
    assert tensors(data.train)[1].tolist() == [[2, 3, 4], [5, 1, 6], [4, 4, 1]]
    assert tensors(data.test)[0].tolist() == [[1, 0, 3]]  # the dog is unknown
    assert data.example().dtype.is_floating_point is False


def test_characters_of_the_same_files(tmp_path: Path) -> None:
    data = load_dataset("characters", data_dir=write(tmp_path, "abba\ncab", "bad\n"), block_length=3)
    assert data.classes == 5  # <unk> a b <newline> c
    assert tensors(data.train)[0].tolist() == [[1, 2, 2], [1, 3, 4]]
    assert tensors(data.train)[1].tolist() == [[2, 2, 1], [3, 4, 1]]
    assert tensors(data.test)[0].tolist() == [[2, 1, 0]] and tensors(data.test)[1].tolist() == [[1, 0, 3]]
    with pytest.raises(DataError, match=r"8 training and 4 test characters\): write 1 to 3"):
        load_dataset("characters", data_dir=tmp_path, block_length=4)


def test_wikitext103_comes_from_files_or_from_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from_files = load_dataset("wikitext103", data_dir=write(tmp_path), block_length=3)
    asked = []

    def load(*name: str, split: str) -> list[dict[str, str]]:
        asked.append((*name, split))
        return [{"text": line} for line in (TRAIN if split == "train" else TEST).splitlines()]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    loaded = load_dataset("wikitext103", block_length=3)
    assert asked[0] == ("Salesforce/wikitext", "wikitext-103-v1", "train")
    assert tensors(loaded.train)[0].tolist() == tensors(from_files.train)[0].tolist()


def test_without_library_or_network_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"fractrain_fx\[text\]"):
        load_dataset("wikitext103")

    def fail(*args: object, **kwargs: object) -> None:
        raise ConnectionError("offline")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=fail))
    with pytest.raises(DataError, match=r"offline.*data_dir"):
        load_dataset("wikitext103")


def test_texts_that_cannot_be_used_are_explained(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="data_dir"):
        load_dataset("text")
    with pytest.raises(DataError, match="'train'"):
        load_dataset("text", data_dir=tmp_path)
    write(tmp_path)
    with pytest.raises(DataError, match="write 1 to 5"):
        load_dataset("text", data_dir=tmp_path, block_length=6)
    write(tmp_path, test="")
    with pytest.raises(DataError, match="longer texts"):
        load_dataset("text", data_dir=tmp_path, block_length=3)
    (tmp_path / "wiki.test.tokens").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="UTF-8"):
        load_dataset("text", data_dir=tmp_path)
