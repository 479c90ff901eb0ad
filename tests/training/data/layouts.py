"""Small data sets in the layouts that the real ones have."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor
from torch.utils.data import TensorDataset

from fractrain_fx.training.data.dataset import Samples


def tensors(samples: Samples) -> tuple[Tensor, ...]:
    """Samples that are in memory: inputs and targets."""
    assert isinstance(samples, TensorDataset)
    return samples.tensors


def cifar_batch(images: int, classes: int, labels: str, seed: int) -> dict[str, Any]:
    """One file's content: random bytes, and class numbers in turn."""
    pixels = np.random.default_rng(seed).integers(0, 256, (images, 3072), dtype=np.uint8)
    return {"data": pixels, labels: [index % classes for index in range(images)], "batch_label": "a part"}


def write_cifar10(folder: Path, images: int = 20, protocol: int = 4) -> Path:
    """The six files of CIFAR-10, ``images`` in each."""
    out = folder / "cifar-10-batches-py"
    out.mkdir(parents=True)
    for seed, name in enumerate([*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]):
        (out / name).write_bytes(pickle.dumps(cifar_batch(images, 10, "labels", seed), protocol))
    return out


def write_cifar100(folder: Path, images: int = 400) -> Path:
    """The two files of CIFAR-100."""
    out = folder / "cifar-100-python"
    out.mkdir(parents=True)
    for seed, name in enumerate(("train", "test")):
        (out / name).write_bytes(pickle.dumps(cifar_batch(images, 100, "fine_labels", seed), 4))
    return out


def write_images(folder: Path, images: int = 6, classes: tuple[str, ...] = ("cat", "dog")) -> Path:
    """A folder of images: ``train`` and ``val``, a folder a class."""
    random = np.random.default_rng(0)
    for part in ("train", "val"):
        for name in classes:
            place = folder / part / name
            place.mkdir(parents=True)
            for index in range(images):
                pixels = random.integers(0, 256, (40, 48, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{index}.png")
    return folder
