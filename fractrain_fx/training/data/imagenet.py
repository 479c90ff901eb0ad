"""ImageNet, or any folder of images in its layout, with timm's transforms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fractrain_fx.errors import DataError
from fractrain_fx.training.data.dataset import DataSet, ImageFiles

__all__ = ["load_image_folder"]

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
        found = ImageFolder(str(folder))
    except FileNotFoundError as error:  # also where a class has no images
        raise DataError(f"{folder} is not a folder with one folder of images for each class: {error}") from error
    paths, targets = zip(*found.samples, strict=True)
    return found.classes, ImageFiles(tuple(paths), torch.tensor(targets), _transform)


def _transform(side: int, training: bool) -> Callable[[Any], Tensor]:
    from timm.data.transforms_factory import create_transform

    colours: Any = None  # its annotation knows only numbers
    transform: Callable[[Any], Tensor] = create_transform(
        (3, side, side), is_training=training, color_jitter=colours, interpolation="bilinear"
    )
    return transform
