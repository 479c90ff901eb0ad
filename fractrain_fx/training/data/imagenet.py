"""ImageNet, or any folder of images in its layout, with timm's transforms; reading the images in worker processes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fractrain_fx.errors import DataError
from fractrain_fx.training.data.dataset import DataSet, ImageFiles

__all__ = ["image_transform", "load_image_folder", "read_batches"]

_SIDE = 224


def load_image_folder(name: str, data_dir: Path | None) -> DataSet:
    """Images in ``data_dir/train/CLASS/*`` and ``data_dir/val/CLASS/*``.

    Training images are cropped at random sizes and mirrored, test images scaled and cropped in the middle: timm's
    transforms without its colour changes, which the paper's baseline does not have.

    Raises:
        DataError: no folder was given, it lacks train or val, or these have different classes.
    """
    if data_dir is None:
        raise DataError(f"{name} is read from a folder: give data_dir=..., with train/CLASS/ and val/CLASS/ in it")
    train_classes, train = _listed(data_dir / "train")
    test_classes, test = _listed(data_dir / "val")
    if train_classes != test_classes:
        odd = sorted(set(train_classes) ^ set(test_classes))
        raise DataError(f"{data_dir}: train and val must have the same classes, only one has {', '.join(odd[:5])}")
    return DataSet(name, "classification", len(train_classes), train, test, augmentations=("timm", "none"), side=_SIDE)


def _listed(folder: Path) -> tuple[list[str], ImageFiles]:
    from torchvision.datasets import ImageFolder

    try:
        images = ImageFolder(str(folder))
    except FileNotFoundError as error:  # also where a class has no images
        raise DataError(f"{folder} is not a folder with one folder of images for each class: {error}") from error
    paths, targets = zip(*images.samples, strict=True)
    return images.classes, ImageFiles(tuple(paths), torch.tensor(targets))


def image_transform(side: int, augment: bool) -> Callable[[Any], Tensor]:
    """The function from an opened image to a normalised tensor of a side; ``augment``: as in training."""
    from timm.data.transforms_factory import create_transform

    colours: Any = None  # its annotation knows only numbers
    transform: Callable[[Any], Tensor] = create_transform(
        (3, side, side), is_training=augment, color_jitter=colours, interpolation="bilinear"
    )
    return transform


def read_batches(
    files: ImageFiles, transform: Callable[[Any], Tensor], batches: Sequence[Sequence[tuple[int, int]]], workers: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Images and class numbers of the given batches. An image's augmentation depends on its seed alone.

    Args:
        files: the images.
        transform: from an opened image to a tensor; may draw from torch's and Python's generators.
        batches: for each batch the position of each image and the seed of its augmentation.
        workers: processes that read; 0 reads in this one.

    Raises:
        DataError: a file is damaged or gone.
    """
    # DataLoader takes any list of batches as a batch sampler, although its annotation asks for whole numbers.
    sampler: Any = batches
    loader = DataLoader(
        _Opened(files, transform),
        batch_sampler=sampler,
        num_workers=workers,
        generator=torch.Generator().manual_seed(0),  # otherwise it draws a number from the default generator
    )
    try:
        yield from loader
    except DataError as error:  # a worker's error has the worker's traceback before its message
        raise DataError(str(error).rpartition("DataError: ")[2].strip()) from None


class _Opened(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, files: ImageFiles, transform: Callable[[Any], Tensor]) -> None:
        self._files, self._transform = files, transform

    def __getitem__(self, place: tuple[int, int]) -> tuple[Tensor, Tensor]:
        from PIL import Image, UnidentifiedImageError

        index, seed = place
        path = self._files.paths[index]
        try:
            with Image.open(path) as opened:
                image = opened.convert("RGB")
        except (OSError, SyntaxError, UnidentifiedImageError) as error:
            raise DataError(f"{path} could not be read as an image ({error}): restore or remove it") from error
        # In the main process these generators also draw the noise and dropout, so their state is restored.
        state = random.getstate()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            random.seed(seed)
            tensor = self._transform(image)
        random.setstate(state)
        return tensor, self._files.targets[index]
