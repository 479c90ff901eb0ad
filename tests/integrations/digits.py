"""Scikit-learn's handwritten digits, as images of one channel or of three."""

from __future__ import annotations

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset


@cache
def digits(count: int, channels: int = 3, offset: int = 0) -> TensorDataset:
    """8 x 8 images from 0 to 1, with their labels."""
    data = load_digits()
    images = torch.tensor(data.images[offset : offset + count] / 16, dtype=torch.float32)
    labels = torch.tensor(data.target[offset : offset + count])
    return TensorDataset(images.unsqueeze(1).expand(-1, channels, -1, -1).contiguous(), labels)
