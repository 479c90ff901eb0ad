"""Measure how far the gates' choices depend on the input, over the samples of an evaluation.

Gates that give every sample the same option can hold a target cp as well as gates that choose by input. No mean over
samples tells the two apart.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from fractrain_fx.engine.distributed import gather_over_ranks

__all__ = ["ChoiceMeter", "InputDependence", "configurations_of", "entropy_bits", "input_dependence"]


@dataclass(frozen=True)
class InputDependence:
    """How choices vary over samples. A configuration is the options that one sample got in all blocks.

    Attributes:
        mutual_information: between sample and option in bits, for each block. Each sample has one choice in a block, so
            this is the entropy of the options' shares: 0 if all samples have the same option.
        configurations: number of different configurations.
        commonest: share (0..1) of the samples with the most frequent configuration.
    """

    mutual_information: dict[str, float]
    configurations: int
    commonest: float

    @property
    def mean_information(self) -> float:
        """Mutual information in bits, mean over the blocks."""
        return sum(self.mutual_information.values()) / len(self.mutual_information)


class ChoiceMeter:
    """Counts the configurations that the samples of an evaluation got."""

    def __init__(self) -> None:
        self._blocks: tuple[str, ...] = ()
        self._counts: Counter[tuple[int, ...]] = Counter()

    def add(self, choice: Mapping[str, Float[Tensor, "batch options"]]) -> None:
        """Take one batch: for each block the one-hot choice of every sample; empty without gates."""
        if choice:
            self._blocks = tuple(choice)
            self._counts.update(configurations_of(choice))

    def read(self) -> InputDependence | None:
        """The result over all processes; a collective. ``None`` if no batch had a choice."""
        parts: Sequence[tuple[tuple[str, ...], Counter[tuple[int, ...]]]]
        parts = gather_over_ranks((self._blocks, self._counts))
        total: Counter[tuple[int, ...]] = Counter()
        blocks: tuple[str, ...] = ()
        for names, counts in parts:
            total.update(counts)
            blocks = names or blocks
        return input_dependence(blocks, total) if total else None


def configurations_of(choice: Mapping[str, Float[Tensor, "batch options"]]) -> Counter[tuple[int, ...]]:
    """The number of samples with each configuration, from the one-hot choice of every sample in each block."""
    options = torch.stack([one_hot.argmax(1) for one_hot in choice.values()], dim=1)
    return Counter(map(tuple, options.tolist()))


def input_dependence(blocks: Sequence[str], counts: Counter[tuple[int, ...]]) -> InputDependence:
    """The measures from the number of samples with each configuration (the option's number in every block)."""
    configurations, samples = torch.tensor(list(counts)), torch.tensor(list(counts.values())).float()
    options = int(configurations.max()) + 1
    information = {}
    for block, chosen in zip(blocks, configurations.unbind(1), strict=True):
        information[block] = entropy_bits(torch.zeros(options).index_add(0, chosen, samples))
    return InputDependence(information, len(counts), max(counts.values()) / counts.total())


def entropy_bits(counts: Float[Tensor, " values"]) -> float:
    """Entropy in bits of counts, taken as shares of their sum."""
    shares = counts.double() / counts.sum()
    return float(torch.special.entr(shares).sum()) / math.log(2)
