"""Subsets and the phases of the paper's settings: seeded, balanced, without overlap."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fractrain_fx.errors import DataError
from fractrain_fx.training.data import DataSet, draw_subset, load_dataset, phases_of
from fractrain_fx.training.data.dataset import ImageFiles
from tests.training.data.layouts import tensors, write_cifar100, write_images


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    return load_dataset("cifar100", data_dir=write_cifar100(tmp_path_factory.mktemp("cifar")).parent)


def ids(images: torch.Tensor) -> set[bytes]:
    return {bytes(image.flatten()[:64].tolist()) for image in images}


def test_a_subset_has_each_class_alike_and_is_decided_by_its_seed(cifar: DataSet) -> None:
    first, again, other = (draw_subset(cifar, 200, 100, seed) for seed in (3, 3, 4))
    assert torch.bincount(tensors(first.train)[1]).tolist() == [2] * 100
    assert torch.bincount(tensors(first.test)[1]).tolist() == [1] * 100
    assert torch.equal(tensors(first.train)[0], tensors(again.train)[0])
    assert ids(tensors(first.train)[0]) != ids(tensors(other.train)[0])
    assert draw_subset(cifar, None, 10**6) == cifar


def test_a_subset_of_a_text_is_its_beginning() -> None:
    data = load_dataset("pydoc")
    part = draw_subset(data, 10, 10)
    assert torch.equal(tensors(part.train)[0], tensors(data.train)[0][:10]) and len(part.test) == 10


def test_adaptation_parts_the_classes_in_training_and_test(cifar: DataSet) -> None:
    first, second = phases_of(cifar, "adaptation", seed=1)
    for phase in (first, second):
        assert phase.classes == 50 and set(tensors(phase.train)[1].tolist()) == set(range(50))
        assert len(phase.train) == 200 and len(phase.test) == 200
    for part in ("train", "test"):
        ours, theirs = (ids(tensors(getattr(phase, part))[0]) for phase in (first, second))
        assert not ours & theirs and ours | theirs == ids(tensors(getattr(cifar, part))[0])
    # One original class is one new class, in training and in test.
    classes = {int(tensors(cifar.train)[1][index]) for index in range(400)}
    assert classes == set(range(100))
    other = phases_of(cifar, "adaptation", seed=2)[0]
    assert ids(tensors(other.train)[0]) != ids(tensors(first.train)[0])


def test_adaptation_numbers_the_classes_alike_in_training_and_test(cifar: DataSet) -> None:
    first, _ = phases_of(cifar, "adaptation", seed=1)
    originals: dict[int, int] = {}
    for part in ("train", "test"):
        images, labels = tensors(getattr(cifar, part))
        known = {bytes(image.flatten()[:64].tolist()): int(label) for image, label in zip(images, labels, strict=True)}
        new_images, new = tensors(getattr(first, part))
        for image, label in zip(new_images, new.tolist(), strict=True):
            old = known[bytes(image.flatten()[:64].tolist())]
            assert originals.setdefault(label, old) == old


def test_fine_tuning_halves_each_class_and_keeps_the_test_set(cifar: DataSet) -> None:
    first, second = phases_of(cifar, "fine-tuning", seed=0)
    for phase in (first, second):
        assert torch.bincount(tensors(phase.train)[1]).tolist() == [2] * 100
        assert phase.test is cifar.test and phase.classes == 100
    ours, theirs = (ids(tensors(phase.train)[0]) for phase in (first, second))
    assert not ours & theirs and len(ours | theirs) == 400


def test_image_files_are_split_alike(tmp_path: Path) -> None:
    data = load_dataset("imagenet", data_dir=write_images(tmp_path, classes=("a", "b", "c", "d")))
    first, second = phases_of(data, "adaptation")
    assert first.classes == 2 and len(first.train) == 12
    ours, theirs = first.train, second.train
    assert isinstance(ours, ImageFiles) and isinstance(theirs, ImageFiles) and not set(ours.paths) & set(theirs.paths)
    assert len(draw_subset(data, 8, 4).train) == 8
    halves = phases_of(data, "fine-tuning")
    assert [len(each.train) for each in halves] == [12, 12]


def test_a_text_is_fine_tuned_but_not_adapted_to() -> None:
    data = load_dataset("pydoc")
    first, second = phases_of(data, "fine-tuning")
    assert len(first.train) + len(second.train) == len(data.train)
    with pytest.raises(DataError, match="fine-tuning"):
        phases_of(data, "adaptation")


def test_samples_must_suffice(cifar: DataSet) -> None:
    with pytest.raises(DataError, match="use more"):
        phases_of(draw_subset(cifar, 400, 2), "adaptation")
    with pytest.raises(DataError, match="too few"):
        phases_of(draw_subset(load_dataset("pydoc"), 1, 1), "fine-tuning")
