"""Subsets and the phases of the paper's settings: seeded, balanced, without overlap."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fractrain_fx.errors import DataError
from fractrain_fx.training.data import DataSet, draw_subset, load_dataset, phases_of
from tests.training.data.layouts import write_cifar100, write_images


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    return load_dataset("cifar100", data_dir=write_cifar100(tmp_path_factory.mktemp("cifar")).parent)


def ids(images: torch.Tensor) -> set[bytes]:
    return {bytes(image.flatten()[:64].tolist()) for image in images}


def test_a_subset_has_each_class_alike_and_is_decided_by_its_seed(cifar: DataSet) -> None:
    first, again, other = (draw_subset(cifar, 200, 100, seed) for seed in (3, 3, 4))
    assert torch.bincount(first.train.tensors[1]).tolist() == [2] * 100
    assert torch.bincount(first.test.tensors[1]).tolist() == [1] * 100
    assert torch.equal(first.train.tensors[0], again.train.tensors[0])
    assert ids(first.train.tensors[0]) != ids(other.train.tensors[0])
    assert draw_subset(cifar, None, 10**6) == cifar


def test_a_subset_of_a_text_is_its_beginning() -> None:
    data = load_dataset("pydoc")
    part = draw_subset(data, 10, 10)
    assert torch.equal(part.train.tensors[0], data.train.tensors[0][:10]) and len(part.test) == 10


def test_adaptation_parts_the_classes_in_training_and_test(cifar: DataSet) -> None:
    first, second = phases_of(cifar, "adaptation", seed=1)
    for phase in (first, second):
        assert phase.classes == 50 and set(phase.train.tensors[1].tolist()) == set(range(50))
        assert len(phase.train) == 200 and len(phase.test) == 200
    for part in ("train", "test"):
        ours, theirs = (ids(getattr(phase, part).tensors[0]) for phase in (first, second))
        assert not ours & theirs and ours | theirs == ids(getattr(cifar, part).tensors[0])
    # One original class is one new class, in training and in test.
    classes = {int(cifar.train.tensors[1][index]) for index in range(400)}
    assert classes == set(range(100))
    other = phases_of(cifar, "adaptation", seed=2)[0]
    assert ids(other.train.tensors[0]) != ids(first.train.tensors[0])


def test_adaptation_numbers_the_classes_alike_in_training_and_test(cifar: DataSet) -> None:
    first, _ = phases_of(cifar, "adaptation", seed=1)
    originals = {}
    for part in ("train", "test"):
        images, labels = getattr(cifar, part).tensors
        known = {bytes(image.flatten()[:64].tolist()): int(label) for image, label in zip(images, labels, strict=True)}
        new_images, new = getattr(first, part).tensors
        for image, label in zip(new_images, new.tolist(), strict=True):
            old = known[bytes(image.flatten()[:64].tolist())]
            assert originals.setdefault(label, old) == old


def test_fine_tuning_halves_each_class_and_keeps_the_test_set(cifar: DataSet) -> None:
    first, second = phases_of(cifar, "fine-tuning", seed=0)
    for phase in (first, second):
        assert torch.bincount(phase.train.tensors[1]).tolist() == [2] * 100
        assert phase.test is cifar.test and phase.classes == 100
    ours, theirs = (ids(phase.train.tensors[0]) for phase in (first, second))
    assert not ours & theirs and len(ours | theirs) == 400


def test_image_files_are_split_alike(tmp_path: Path) -> None:
    data = load_dataset("imagenet", data_dir=write_images(tmp_path, classes=("a", "b", "c", "d")))
    first, second = phases_of(data, "adaptation")
    assert first.classes == 2 and len(first.train) == 12
    assert not set(first.train.paths) & set(second.train.paths)
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
