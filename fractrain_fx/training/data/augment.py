"""The CIFAR augmentation for whole batches: pad, crop at random, mirror at random (paper, 4.1; He et al., 2016)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor
from torch.nn import functional as F

__all__ = ["CropFlip"]

_PAD = 4


@dataclass(frozen=True)
class CropFlip:
    """The corner of the crop and whether to mirror, for each of many images.

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
