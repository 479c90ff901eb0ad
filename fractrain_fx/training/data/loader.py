"""Batches for one process: from memory, on the model's device and without a loop over samples, or from image files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from fractrain_fx.errors import DataError
from fractrain_fx.training.data.dataset import DataSet, ImageFiles
from fractrain_fx.training.data.imagenet import image_transform, read_batches

__all__ = ["CropFlip", "Loader", "Share", "by_name", "make_loader"]

_PAD = 4


@dataclass(frozen=True)
class Share:
    """The share of one of several processes.

    Attributes:
        batch: samples of a step in this process.
        seed: seed of order and augmentation.
        device: the device of the batches.
        rank, ranks: number of this process, and of all processes.
        workers: processes that read image files.
        resident: bytes of samples that may lie on the device, beside the model.
    """

    batch: int
    seed: int
    device: torch.device
    rank: int = 0
    ranks: int = 1
    workers: int = 0
    resident: int = 1 << 30


class Loader(ABC):
    """Batches of inputs and targets on the model's device, from shuffled passes over the training samples.

    The samples of a step depend on its number and the seed only, so a run can start at any step. They are the same for
    any number of processes with the same ``batch * ranks``. Samples that do not fill a step at the end of a pass are
    left out of that pass. With fewer samples than a step takes, each step takes all.

    Args:
        data: training and test samples.
        share: the part of this process.

    Attributes:
        steps: training steps of a pass.

    Raises:
        DataError: there are fewer samples than processes.
    """

    def __init__(self, data: DataSet, share: Share) -> None:
        samples = len(data.train)
        if samples < share.ranks:
            raise DataError(f"{samples} training samples are too few for {share.ranks} processes: use more of them")
        self._data, self._share = data, share
        self.steps = max(1, samples // (share.batch * share.ranks))

    def _rows(self, number: int) -> tuple[int, Int[Tensor, " batch"]]:
        """The pass, counted from 0, that step ``number`` (from 0, over all passes) belongs to, and its samples."""
        samples, share = len(self._data.train), self._share
        turn, place = divmod(number, self.steps)
        size = min(share.batch, samples // share.ranks)
        first = (place * share.ranks + share.rank) * size
        return turn, _shuffled(samples, share.seed, turn)[first : first + size]

    @abstractmethod
    def train(self, first: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Training batches ``first`` to ``first + count`` (over all passes), always the same ones."""

    @abstractmethod
    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's part of the test samples; all parts together hold each sample once."""


def make_loader(data: DataSet, share: Share) -> Loader:
    """The loader that suits a data set; training images are augmented by its first augmentation.

    Raises:
        DataError: there are fewer samples than processes.
    """
    return TensorLoader(data, share) if isinstance(data.train, TensorDataset) else FileLoader(data, share)


def by_name(batches: Iterable[tuple[Tensor, Tensor]], name: str | None) -> Iterator[tuple[Any, Tensor]]:
    """Batches whose inputs are a mapping from the name of the model's input; as they are if it has no name."""
    return ((inputs if name is None else {name: inputs}, targets) for inputs, targets in batches)


class TensorLoader(Loader):
    """Batches of samples that are held in memory."""

    def __init__(self, data: DataSet, share: Share) -> None:
        super().__init__(data, share)
        self._train, self._test = (_near(cast(TensorDataset, part), share) for part in (data.train, data.test))
        self._draw = lru_cache(maxsize=1)(self._drawn)

    def train(self, first: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(first, first + count):
            turn, rows = self._rows(number)
            inputs, targets = self._pick(self._train, rows)
            if self._data.augmentations[0] == "crop-flip":
                # Drawn for each sample, not for each place in a batch, so the number of processes does not matter.
                inputs = self._draw(turn)(inputs, rows.to(inputs.device))
            yield self._ready(inputs, targets)

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        mine = torch.arange(self._share.rank, len(self._data.test), self._share.ranks)
        for first in range(0, len(mine), self._share.batch):
            rows = mine[first : first + self._share.batch]
            yield self._ready(*self._pick(self._test, rows))

    @staticmethod
    def _pick(held: tuple[Tensor, Tensor], rows: Tensor) -> tuple[Tensor, Tensor]:
        rows = rows.to(held[0].device)
        # Copies whole samples; an index of rows copies bytes one by one.
        return held[0].index_select(0, rows), held[1].index_select(0, rows)

    def _ready(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        device = self._share.device
        return self._data.prepare(inputs.to(device)), targets.to(device, torch.int64)

    def _drawn(self, turn: int) -> CropFlip:
        return CropFlip.draw(len(self._data.train), _generator(self._share.seed, turn, 1)).to(self._train[0].device)


class FileLoader(Loader):
    """Batches of images that are read, transformed and stacked by worker processes."""

    def train(self, first: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        batches = []
        for number in range(first, first + count):
            turn, rows = self._rows(number)
            seed, images = self._share.seed, len(self._data.train)
            batches.append([(row, _mixed(seed, turn, images, row)) for row in rows.tolist()])
        return self._read(train=True, batches=batches)

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        mine = range(self._share.rank, len(self._data.test), self._share.ranks)
        rows = [(row, 0) for row in mine]
        batches = [rows[at : at + self._share.batch] for at in range(0, len(rows), self._share.batch)]
        return self._read(train=False, batches=batches)

    def _read(self, *, train: bool, batches: list[list[tuple[int, int]]]) -> Iterator[tuple[Tensor, Tensor]]:
        side = self._data.shape[1] if self._data.shape is not None else self._data.side
        files = cast(ImageFiles, self._data.train if train else self._data.test)
        transform = image_transform(side, train and self._data.augmentations[0] == "timm")
        for inputs, targets in read_batches(files, transform, batches, self._share.workers):
            yield inputs.to(self._share.device), targets.to(self._share.device)


@dataclass(frozen=True)
class CropFlip:
    """CIFAR's augmentation for whole batches: pad, crop and mirror at random (paper, 4.1; He et al., 2016).

    Attributes:
        top, left: corner of the crop in the image padded by 4 black pixels: 0..8.
        mirrored: whether left and right are exchanged.
    """

    top: Int[Tensor, " n"]
    left: Int[Tensor, " n"]
    mirrored: Bool[Tensor, " n"]

    @classmethod
    def draw(cls, images: int, generator: torch.Generator) -> CropFlip:
        """Draw for ``images`` images, uniformly and independently."""
        corner = torch.randint(2 * _PAD + 1, (2, images), generator=generator)
        return cls(corner[0], corner[1], torch.rand(images, generator=generator) < 0.5)

    def to(self, device: torch.device) -> CropFlip:
        """The same draw on another device."""
        return CropFlip(self.top.to(device), self.left.to(device), self.mirrored.to(device))

    def __call__(
        self, images: Shaped[Tensor, "batch channels height width"], rows: Int[Tensor, " batch"]
    ) -> Shaped[Tensor, "batch channels height width"]:
        """Crop and mirror a batch of bytes, in which 0 is black.

        Args:
            images: the batch.
            rows: position of each image in the draw.
        """
        batch, channels, height, width = images.shape
        padded = F.pad(images, (_PAD,) * 4)
        down = self.top[rows, None] + torch.arange(height, device=images.device)
        across = torch.arange(width, device=images.device).expand(batch, width)
        across = torch.where(self.mirrored[rows, None], width - 1 - across, across) + self.left[rows, None]
        # One gather for all images, with the same places in each channel.
        places = (down[:, :, None] * padded.shape[3] + across[:, None, :]).view(batch, 1, -1)
        return padded.flatten(2).gather(2, places.expand(-1, channels, -1)).view_as(images)


@lru_cache(maxsize=2)
def _shuffled(samples: int, seed: int, turn: int) -> Int[Tensor, " samples"]:
    return torch.randperm(samples, generator=_generator(seed, turn, 0))


def _generator(seed: int, turn: int, purpose: int) -> torch.Generator:
    """A separate generator for each seed, pass and purpose (0: order, 1: augmentation)."""
    return torch.Generator().manual_seed(_mixed(seed, turn, 2, purpose))


def _mixed(seed: int, turn: int, count: int, number: int) -> int:
    """A seed for each seed of a run, pass, and ``number`` below ``count``; torch takes seeds of 64 bits."""
    return ((seed * 1_000_003 + turn) * count + number) % 2**64


def _near(samples: TensorDataset, share: Share) -> tuple[Tensor, Tensor]:
    """Inputs and targets, on the device if they are few enough to stay there beside a model."""
    inputs, targets = samples.tensors
    if inputs.nbytes + targets.nbytes > share.resident:
        return inputs, targets
    return inputs.to(share.device), targets.to(share.device)
