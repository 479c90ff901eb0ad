"""The embedded data sets: fixed splits, shapes, and clear refusals."""

from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from fractrain_fx.errors import ConfigError, DataError
from fractrain_fx.training.data import load_dataset
from tests.training.data.layouts import tensors


def test_digits_have_a_fixed_split_with_every_class_in_both_parts() -> None:
    torch.manual_seed(0)
    first = load_dataset("digits")
    torch.manual_seed(1)
    second = load_dataset("digits")
    assert len(first.train) + len(first.test) == 1797
    assert torch.equal(tensors(first.test)[0], tensors(second.test)[0])
    assert set(tensors(first.test)[1].tolist()) == set(range(10))


def test_digits_are_normalised_by_the_training_part() -> None:
    images = tensors(load_dataset("digits").train)[0]
    # float32 sums of 92,000 pixels
    assert images.mean().abs() < 1e-4 and (images.std() - 1).abs() < 1e-3


def test_images_are_enlarged_when_a_batch_is_made() -> None:
    data = load_dataset("digits").sized(3, 32)
    small = tensors(data.train)[0][:4]
    inputs = data.prepare(small)
    assert inputs.shape == (4, 3, 32, 32)
    assert torch.equal(inputs[:, 0], inputs[:, 2])
    assert torch.allclose(inputs.mean(), small.mean(), atol=1e-5)


def test_text_targets_are_the_inputs_one_character_later() -> None:
    data = load_dataset("pydoc", block_length=16)
    train = TensorDataset(*tensors(data.train))
    inputs, targets = train[3]
    assert inputs.shape == (16,) and torch.equal(inputs[1:], targets[:-1])
    assert torch.equal(train[4][0][:1], targets[-1:])
    assert int(tensors(data.train)[0].max()) < data.classes


def test_text_is_split_without_overlap_four_to_one() -> None:
    data = load_dataset("pydoc")
    assert 3.8 < len(data.train) / len(data.test) < 4.2


def test_an_unknown_name_offers_near_ones() -> None:
    with pytest.raises(DataError, match="'digits'"):
        load_dataset("digit")


def test_a_folder_must_be_one_and_make_sense(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a folder"):
        load_dataset("cifar10", data_dir=tmp_path / "nowhere")
    with pytest.raises(DataError, match="leave out data_dir"):
        load_dataset("digits", data_dir=tmp_path)


def test_an_augmentation_must_suit_the_data() -> None:
    with pytest.raises(ConfigError, match="write none"):
        load_dataset("digits").augmented("crop-flip")


@pytest.mark.parametrize("length", [0, 10**7])
def test_a_block_must_fit_the_text(length: int) -> None:
    with pytest.raises(DataError, match="block_length"):
        load_dataset("pydoc", block_length=length)
