"""Data sets that need no files: scikit-learn's handwritten digits, and the text of Python's documentation."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.data import TensorDataset

from fractrain_fx.errors import DataError, require_packages
from fractrain_fx.training.data.dataset import DataSet, Task
from fractrain_fx.training.data.text import blocks

__all__ = ["load_digits", "load_pydoc", "stand_in"]

# The split is part of the data set: runs with other seeds must see the same test samples.
_SPLIT_SEED = 0
_TEST_SHARE = 0.2


def stand_in(task: Task, classes: int, *, block_length: int = 64) -> DataSet:
    """Two random samples of a task, to record a model without a data set."""
    generator = torch.Generator().manual_seed(_SPLIT_SEED)
    if task == "classification":
        samples = TensorDataset(torch.randn(2, 1, 8, 8, generator=generator), torch.zeros(2, dtype=torch.int64))
    else:
        samples = blocks(torch.randint(classes, (2 * block_length + 1,), generator=generator), block_length)
    return DataSet("random samples", task, classes, samples, samples)


def load_digits() -> DataSet:
    """1,797 grey images of 8x8 in ten classes."""
    require_packages("data='digits'", "train")
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    train, test, train_labels, test_labels = train_test_split(
        images, labels, test_size=_TEST_SHARE, random_state=_SPLIT_SEED, stratify=labels
    )
    mean, std = train.mean(), train.std()

    def split(images: object, labels: object) -> TensorDataset:
        pixels: Float[Tensor, "n 64"] = (torch.as_tensor(images, dtype=torch.float32) - mean) / std
        return TensorDataset(pixels.view(-1, 1, 8, 8), torch.as_tensor(labels, dtype=torch.int64))

    return DataSet("digits", "classification", 10, split(train, train_labels), split(test, test_labels))


def load_pydoc(block_length: int) -> DataSet:
    """Python's documentation as characters, each to be predicted from those before it.

    Raises:
        DataError: a block is longer than the text allows.
    """
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[topic] for topic in sorted(topics))
    vocabulary = {character: index for index, character in enumerate(sorted(set(text)))}
    tokens: Int[Tensor, " n"] = torch.tensor([vocabulary[character] for character in text])
    longest = int(len(tokens) * _TEST_SHARE) - 1
    if not 1 <= block_length <= longest:
        raise DataError(f"block_length={block_length} does not fit the text: write 1 to {longest}")
    cut = int(len(tokens) * (1 - _TEST_SHARE))
    train, test = (blocks(part, block_length) for part in (tokens[:cut], tokens[cut:]))
    return DataSet("pydoc", "language", len(vocabulary), train, test)
