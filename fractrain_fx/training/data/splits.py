"""Parts of a data set: seeded subsets, and the two phases of the paper's settings (supplement, section 5)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.utils.data import TensorDataset

from fractrain_fx.errors import DataError
from fractrain_fx.training.data.dataset import DataSet, ImageFiles, Samples, targets_of

__all__ = ["Setting", "draw_subset", "phases_of"]

Setting = Literal["standard", "adaptation", "fine-tuning"]


def draw_subset(data: DataSet, train: int | None, test: int | None, seed: int = 0) -> DataSet:
    """At most ``train`` and ``test`` samples: the same share of each class of images, or the first blocks of text.

    ``seed`` alone decides which images stay; they keep their order.
    """
    return replace(data, train=_some(data, data.train, train, seed), test=_some(data, data.test, test, seed))


def phases_of(data: DataSet, setting: Setting, seed: int = 0) -> tuple[DataSet, DataSet]:
    """The data for pre-training, and the data for training after it.

    ``adaptation``: one half of the classes (drawn by ``seed``, numbered from 0) and the other half, in training and
    test samples. ``fine-tuning``: two halves of the training samples, each with half of every class, and the same test
    samples.

    Raises:
        DataError: adaptation of a data set without classes or with an odd number of them; too few samples.
    """
    if setting == "adaptation":
        if data.task != "classification" or data.classes % 2:
            raise DataError(
                f"adaptation trains on one half of the classes and then on the other: {data.name} has "
                f"{data.classes} {'classes' if data.task == 'classification' else 'tokens and no classes'}; "
                "choose another data set, or the setting fine-tuning"
            )
        classes = torch.randperm(data.classes, generator=torch.Generator().manual_seed(seed))
        first, second = classes.chunk(2)
        return _only(data, first), _only(data, second)
    halves = _halves(data, seed)
    phases = [replace(data, train=_take(data.train, rows)) for rows in (halves, ~halves)]
    if any(len(phase.train) == 0 for phase in phases):
        raise DataError(f"{data.name} has too few training samples for two halves: use more of them")
    return phases[0], phases[1]


def _only(data: DataSet, classes: Int[Tensor, " n"]) -> DataSet:
    """The samples of some classes, which are numbered in ascending order from 0."""
    classes = classes.sort().values
    parts: list[Samples] = []
    for samples in (data.train, data.test):
        targets = targets_of(samples)
        rows = torch.isin(targets, classes)
        if not rows.any():
            raise DataError(f"{data.name} has no samples of classes {classes.tolist()}: use more of its samples")
        parts.append(_take(samples, rows, torch.searchsorted(classes, targets)))
    return replace(data, classes=len(classes), train=parts[0], test=parts[1])


def _halves(data: DataSet, seed: int) -> Bool[Tensor, " n"]:
    """Which training samples belong to the first half."""
    if data.task == "language":
        return torch.arange(len(data.train)) < (len(data.train) + 1) // 2
    return _rank_in_class(targets_of(data.train), seed) % 2 == 0


def _some(data: DataSet, samples: Samples, count: int | None, seed: int) -> Samples:
    if count is None or count >= len(samples):
        return samples
    rows = torch.zeros(len(samples), dtype=torch.bool)
    if data.task == "language":
        rows[:count] = True
    else:
        # Sorted by rank within their class, the first samples have equally many of each class.
        rank = _rank_in_class(targets_of(samples), seed)
        rows[torch.argsort(rank, stable=True)[:count]] = True
    return _take(samples, rows)


def _rank_in_class(targets: Int[Tensor, " n"], seed: int) -> Int[Tensor, " n"]:
    """For each sample, the number of samples of its class before it in a random order."""
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed))
    by_class = order[torch.argsort(targets[order], stable=True)]
    counts = torch.bincount(targets)
    first = counts.cumsum(0) - counts
    rank = torch.empty_like(targets)
    rank[by_class] = torch.arange(len(targets)) - first[targets[by_class]]
    return rank


def _take(samples: Samples, rows: Bool[Tensor, " n"], targets: Int[Tensor, " n"] | None = None) -> Samples:
    """Some samples, maybe under other class numbers."""
    targets = (targets_of(samples) if targets is None else targets)[rows]
    if isinstance(samples, TensorDataset):
        return TensorDataset(samples.tensors[0][rows], targets)
    paths = tuple(samples.paths[index] for index in rows.nonzero().flatten().tolist())
    return ImageFiles(paths, targets)
