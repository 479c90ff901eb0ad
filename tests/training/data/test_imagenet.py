"""Folders of images: timm's transforms, the same batches whoever reads them, and clear refusals."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fractrain_fx.errors import DataError
from fractrain_fx.training.data import DataSet, load_dataset, make_loader
from fractrain_fx.training.data.dataset import ImageFiles
from fractrain_fx.training.data.loader import Share
from tests.training.data.layouts import write_images


def share(**changes: int) -> Share:
    return Share(**{"batch": 4, "seed": 0, "device": torch.device("cpu")} | changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    return load_dataset("imagenet", data_dir=write_images(tmp_path_factory.mktemp("images"))).sized(3, 32)


def test_a_folder_a_class(images: DataSet) -> None:
    assert images.classes == 2 and len(images.train) == 12 and images.side == 224
    assert images.example().shape == (2, 3, 32, 32)
    batches = list(make_loader(images, share()).test())
    assert [inputs.shape for inputs, _ in batches] == [(4, 3, 32, 32)] * 3
    assert torch.cat([targets for _, targets in batches]).tolist() == [0] * 6 + [1] * 6
    assert torch.cat([inputs for inputs, _ in batches]).abs().max() < 3  # normalised


def test_the_number_of_workers_changes_nothing(images: DataSet) -> None:
    alone, helped = (list(make_loader(images, share(workers=workers)).train(2, 3)) for workers in (0, 2))
    for (ours, labels), (theirs, others) in zip(alone, helped, strict=True):
        assert torch.equal(ours, theirs) and torch.equal(labels, others)


def test_augmentation_is_new_in_each_pass_and_can_be_left_out(images: DataSet) -> None:
    def first_pass(data: DataSet, first: int) -> dict[float, torch.Tensor]:
        inputs = torch.cat([inputs for inputs, _ in make_loader(data, share(workers=0)).train(first, 3)])
        return {round(float(each.mean()), 5): each for each in inputs}

    assert not first_pass(images, 0).keys() & first_pass(images, 3).keys()
    plain = images.augmented("none")
    assert first_pass(plain, 0).keys() == first_pass(plain, 3).keys()


def test_the_largest_seed_augments_many_images(images: DataSet) -> None:
    assert isinstance(images.train, ImageFiles)
    paths, targets = images.train.paths[:1] * 5000, torch.zeros(5000, dtype=torch.int64)
    many = replace(images, train=replace(images.train, paths=paths, targets=targets))
    first, again = (list(make_loader(many, share(seed=2**32 - 1)).train(0, 1)) for _ in range(2))
    assert torch.equal(first[0][0], again[0][0])
    assert len({round(float(each.mean()), 5) for each in first[0][0]}) == 4  # the same file, augmented anew


def test_reading_leaves_the_generators_alone(images: DataSet) -> None:
    before = torch.get_rng_state(), random.getstate()
    list(make_loader(images, share(workers=0)).train(0, 3))
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_image_is_named(workers: int, tmp_path: Path) -> None:
    write_images(tmp_path)
    (tmp_path / "train" / "dog" / "3.png").write_bytes(b"no image")
    data = load_dataset("imagenet", data_dir=tmp_path).sized(3, 32)
    with pytest.raises(DataError, match=r"^\S*3\.png could not be read"):
        list(make_loader(data, share(workers=workers)).train(0, 3))


def test_folders_that_lack_something_are_explained(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="data_dir"):
        load_dataset("imagenet")
    with pytest.raises(DataError, match="train is not a folder"):
        load_dataset("imagenet", data_dir=tmp_path)
    write_images(tmp_path)
    (tmp_path / "val" / "cat").rename(tmp_path / "val" / "cow")
    with pytest.raises(DataError, match="cat, cow"):
        load_dataset("imagenet", data_dir=tmp_path)
