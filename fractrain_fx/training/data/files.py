"""Reading image files in worker processes, so that each image's augmentation depends on its seed alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fractrain_fx.errors import DataError
from fractrain_fx.training.data.dataset import ImageFiles

__all__ = ["read_batches"]


def read_batches(
    files: ImageFiles, transform: Callable[[Any], Tensor], batches: Sequence[Sequence[tuple[int, int]]], workers: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Images and class numbers of the given batches.

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
