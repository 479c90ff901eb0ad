"""The embedded data sets: handwritten digits (scikit-learn) and English text (Python's own documentation topics)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.data import TensorDataset

from fractrain_fx.errors import DataError, near

__all__ = ["DATA_SETS", "DataSet", "Task", "load_dataset", "stand_in"]

Task = Literal["classification", "language"]
DATA_SETS = ("digits", "pydoc")

# The split is part of the data set: runs with other seeds must see the same test samples.
_SPLIT_SEED = 0
_TEST_SHARE = 0.2


@dataclass(frozen=True)
class DataSet:
    """Training and test samples of one task.

    Attributes:
        name: what ``load_dataset`` was asked for.
        task: ``classification`` (images and class numbers) or ``language`` (tokens and the token after each).
        classes: number of classes, or of tokens in the vocabulary.
        train, test: pairs of input and target.
        shape: channels, height and width that images are enlarged to; ``None`` leaves inputs as they are.
    """

    name: str
    task: Task
    classes: int
    train: TensorDataset
    test: TensorDataset
    shape: tuple[int, int, int] | None = None

    def sized(self, channels: int, side: int) -> DataSet:
        """The same images, enlarged (bilinear) to what a model reads whenever a batch is made."""
        return replace(self, shape=(channels, side, side))

    def limited(self, samples: int) -> DataSet:
        """At most the first ``samples`` of training and of test."""
        train, test = (TensorDataset(*(part[:samples] for part in split.tensors)) for split in (self.train, self.test))
        return replace(self, train=train, test=test)

    def collate(self, samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """A batch of inputs and targets."""
        inputs, targets = (torch.stack(column) for column in zip(*samples, strict=True))
        if self.shape is not None:
            channels, *size = self.shape
            inputs = F.interpolate(inputs, size=size, mode="bilinear", align_corners=False)
            inputs = inputs.expand(-1, channels, -1, -1).contiguous()
        return inputs, targets

    def example(self, samples: int = 2) -> Tensor:
        """Inputs of a small batch, to record a model with."""
        return self.collate([self.train[index] for index in range(samples)])[0]


def load_dataset(name: str, *, block_length: int = 64) -> DataSet:
    """Load an embedded data set; nothing is downloaded.

    Args:
        name: ``digits`` (1,797 grey images of 8x8, ten classes) or ``pydoc`` (next-character prediction).
        block_length: characters in a sample of ``pydoc``.

    Raises:
        DataError: the name is unknown, or a block is longer than the text allows.
    """
    if name == "digits":
        return _digits()
    if name == "pydoc":
        return _pydoc(block_length)
    raise DataError(f"data set {name!r} is unknown: write one of {', '.join(DATA_SETS)}.{near(name, DATA_SETS)}")


def stand_in(task: Task, classes: int, *, block_length: int = 64) -> DataSet:
    """Two random samples of a task, to record a model with where no data set is at hand."""
    generator = torch.Generator().manual_seed(_SPLIT_SEED)
    if task == "classification":
        samples = TensorDataset(torch.randn(2, 1, 8, 8, generator=generator), torch.zeros(2, dtype=torch.int64))
    else:
        samples = _blocks(torch.randint(classes, (2 * block_length + 1,), generator=generator), block_length)
    return DataSet("random samples", task, classes, samples, samples)


def _digits() -> DataSet:
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


def _pydoc(block_length: int) -> DataSet:
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[topic] for topic in sorted(topics))
    vocabulary = {character: index for index, character in enumerate(sorted(set(text)))}
    tokens: Int[Tensor, " n"] = torch.tensor([vocabulary[character] for character in text])
    longest = int(len(tokens) * _TEST_SHARE) - 1
    if not 1 <= block_length <= longest:
        raise DataError(f"block_length={block_length} does not fit the text: write 1 to {longest}")
    cut = int(len(tokens) * (1 - _TEST_SHARE))
    return DataSet(
        "pydoc", "language", len(vocabulary), _blocks(tokens[:cut], block_length), _blocks(tokens[cut:], block_length)
    )


def _blocks(tokens: Int[Tensor, " n"], length: int) -> TensorDataset:
    """Neighbouring blocks of ``length`` tokens, each with the same block one token later."""
    count = (len(tokens) - 1) // length
    inputs, targets = (tokens[shift : shift + count * length].view(count, length) for shift in (0, 1))
    return TensorDataset(inputs, targets)
