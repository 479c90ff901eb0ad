"""A data set: training and test samples, and the preparation of a batch for a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.utils.data import TensorDataset

from fractrain_fx.errors import ConfigError

__all__ = ["Augmentation", "DataSet", "ImageFiles", "Samples", "Task", "targets_of"]

Task = Literal["classification", "language"]
Augmentation = Literal["crop-flip", "timm", "none"]


@dataclass(frozen=True)
class ImageFiles:
    """Images that stay on disk until a batch needs them.

    Attributes:
        paths: the files.
        targets: class number of each file.
    """

    paths: tuple[str, ...]
    targets: Int[Tensor, " n"]

    def __len__(self) -> int:
        return len(self.paths)


Samples: TypeAlias = TensorDataset | ImageFiles


@dataclass(frozen=True)
class DataSet:
    """Training and test samples of one task.

    Attributes:
        name: the name for ``load_dataset``.
        task: ``classification`` (images and class numbers) or ``language`` (tokens and the token after each).
        classes: number of classes, or of tokens in the vocabulary.
        train, test: inputs and targets.
        pixels: mean and standard deviation (0..1) of each channel, by which images in bytes are normalised; ``None``
            for inputs that are used as they are.
        augmentations: possible augmentations of training images; the first is the default.
        side: side of the images for a model that takes any size.
        shape: channels, height and width to which images are enlarged; ``None`` does not resize.
    """

    name: str
    task: Task
    classes: int
    train: Samples
    test: Samples
    pixels: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    augmentations: tuple[Augmentation, ...] = ("none",)
    side: int = 32
    shape: tuple[int, int, int] | None = None

    def sized(self, channels: int, side: int) -> DataSet:
        """The same images, enlarged (bilinear) to the size of a model whenever a batch is made."""
        return replace(self, shape=(channels, side, side))

    def augmented(self, augment: Augmentation | None) -> DataSet:
        """The same samples with another augmentation; ``None`` keeps the default.

        Raises:
            ConfigError: this data does not have that augmentation.
        """
        if augment is None:
            return self
        if augment not in self.augmentations:
            raise ConfigError(f"augment={augment!r} does not suit {self.name}: write {' or '.join(self.augmentations)}")
        return replace(self, augmentations=(augment,))

    def prepare(self, inputs: Shaped[Tensor, batch * dims]) -> Tensor:
        """Stacked samples as model inputs: bytes normalised, images enlarged, tokens as integers."""
        if self.task == "language":
            return inputs.to(torch.int64)
        if self.pixels is not None:
            mean, std = (255 * torch.tensor(numbers, device=inputs.device).view(-1, 1, 1) for numbers in self.pixels)
            inputs = inputs.float().sub_(mean).div_(std)
        if self.shape is not None:
            channels, *size = self.shape
            if list(inputs.shape[2:]) != size:
                inputs = F.interpolate(inputs, size=size, mode="bilinear", align_corners=False)
            inputs = inputs.expand(-1, channels, -1, -1).contiguous()
        return inputs

    def example(self, samples: int = 2) -> Tensor:
        """Inputs of a small batch, to record a model with."""
        if isinstance(self.train, TensorDataset):
            return self.prepare(self.train.tensors[0][:samples])
        channels, height, width = self.shape or (3, self.side, self.side)
        generator = torch.Generator().manual_seed(0)
        images: Float[Tensor, "samples channels height width"] = torch.randn(
            samples, channels, height, width, generator=generator
        )
        return images


def targets_of(samples: Samples) -> Int[Tensor, n * positions]:
    """The target of each sample."""
    return samples.tensors[1] if isinstance(samples, TensorDataset) else samples.targets
