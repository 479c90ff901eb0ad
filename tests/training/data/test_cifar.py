"""CIFAR's files: read whatever wrote them, refused if they hold anything else, never run."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision.datasets.utils

from fractrain_fx.errors import DataError
from fractrain_fx.training.data import load_dataset
from tests.training.data.layouts import cifar_batch, tensors, write_cifar10, write_cifar100


@pytest.mark.parametrize("protocol", range(6))
def test_cifar10_is_read_from_any_pickle_protocol(protocol: int, tmp_path: Path) -> None:
    folder = write_cifar10(tmp_path, protocol=protocol)
    data = load_dataset("cifar10", data_dir=tmp_path)
    images, labels = tensors(data.train)
    assert images.shape == (100, 3, 32, 32) and images.dtype == torch.uint8 and data.classes == 10
    third = cifar_batch(20, 10, "labels", 2)["data"]
    assert np.array_equal(images[40:60].flatten(1).numpy(), third)
    assert labels[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert len(load_dataset("cifar10", data_dir=folder).test) == 20  # the folder itself may be given


def test_the_original_files_of_python_2_are_read(tmp_path: Path) -> None:
    folder = write_cifar10(tmp_path)
    # As Python 2 with numpy 1 wrote it: text as bytes, and numpy's module under its old name.
    old = pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [3, 4]}, 2)
    (folder / "test_batch").write_bytes(old.replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))
    assert tensors(load_dataset("cifar10", data_dir=tmp_path).test)[1].tolist() == [3, 4]


def test_cifar100_has_its_fine_labels(tmp_path: Path) -> None:
    write_cifar100(tmp_path)
    data = load_dataset("cifar100", data_dir=tmp_path)
    assert data.classes == 100 and len(data.train) == 400 and int(tensors(data.train)[1].max()) == 99


def test_bytes_become_normalised_images(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    data = load_dataset("cifar10", data_dir=tmp_path).sized(3, 32)
    inputs = data.prepare(torch.full((1, 3, 32, 32), 255, dtype=torch.uint8))
    white = [(1 - 0.4914) / 0.2470, (1 - 0.4822) / 0.2435, (1 - 0.4465) / 0.2616]
    assert torch.allclose(inputs[0, :, 0, 0], torch.tensor(white))


class Command:
    """What a pickle from elsewhere may hold: on loading, it runs a program."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (self.text,)


def test_a_file_with_code_in_it_is_refused_and_not_run(tmp_path: Path) -> None:
    folder = write_cifar10(tmp_path)
    trace = tmp_path / "it-ran"
    (folder / "data_batch_2").write_bytes(pickle.dumps({"data": Command(f"touch {trace}"), "labels": []}))
    with pytest.raises(DataError, match=r"data_batch_2 asks for posix\.system"):
        load_dataset("cifar10", data_dir=tmp_path)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "damaged"),
        (pickle.dumps(cifar_batch(20, 10, "labels", 0))[:-500], "damaged"),
        (pickle.dumps([1, 2]), "does not hold"),
        (pickle.dumps(cifar_batch(20, 10, "fine_labels", 0)), "'labels'"),
        (pickle.dumps(cifar_batch(20, 11, "labels", 0)), "numbers below 10"),
        (pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}), "does not hold"),
        (pickle.dumps({"data": np.zeros((1, 3072)), "labels": [1]}), "bytes"),
    ],
)
def test_a_damaged_file_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    folder = write_cifar10(tmp_path)
    (folder / "data_batch_5").write_bytes(content)
    with pytest.raises(DataError, match=f"data_batch_5.*{message}"):
        load_dataset("cifar10", data_dir=tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cifar-10-batches-py"):
        load_dataset("cifar10", data_dir=tmp_path)
    folder = write_cifar10(tmp_path)
    (folder / "data_batch_4").unlink()
    with pytest.raises(DataError, match="lacks data_batch_4"):
        load_dataset("cifar10", data_dir=tmp_path)


def test_without_a_folder_torchvision_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(url: str, root: str, *, filename: str, md5: str) -> None:
        asked.append((url, filename, md5))
        write_cifar10(Path(root))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torchvision.datasets.utils, "download_and_extract_archive", download)
    for _ in range(2):
        assert len(load_dataset("cifar10").train) == 100
    source = torchvision.datasets.CIFAR10
    assert asked == [(source.url, source.filename, source.tgz_md5)]


def test_without_a_network_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torchvision.datasets.utils, "download_and_extract_archive", fail)
    with pytest.raises(DataError, match=r"no route to host.*data_dir"):
        load_dataset("cifar100")
