"""How far choices depend on the input: what the gates' options tell about the samples of an evaluation.

Gates that give every sample the same option hold a target cp as well as gates that choose by input, and no mean over
samples tells the two apart.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fractrain_fx.engine.distributed import gather_over_ranks

__all__ = ["ChoiceMeter", "InputDependence", "entropy_bits", "input_dependence"]


@dataclass(frozen=True)
class InputDependence:
    """What the choices of a pass over samples say about them. A configuration is the options of all blocks together.

    Attributes:
        mutual_information: between sample and option in bits, for each block. Each sample has one choice in a block, so
            this is the entropy of the options' shares: 0 where all samples share one option.
        configurations: how many different ones were chosen.
        commonest: share (0..1) of the samples that have the most frequent one.
    """

    mutual_information: dict[str, float]
    configurations: int
    commonest: float

    @property
    def mean_information(self) -> float:
        """Mutual information in bits a block, mean over the blocks."""
        return sum(self.mutual_information.values()) / len(self.mutual_information)


class ChoiceMeter:
    """Counts the configurations that the samples of an evaluation were given."""

    def __init__(self) -> None:
        self._blocks: tuple[str, ...] = ()
        self._counts: Counter[tuple[int, ...]] = Counter()

    def add(self, choice: Mapping[str, Float[Tensor, "batch options"]]) -> None:
        """Take one batch: for each block the one-hot choice of every sample; nothing where there are no gates."""
        if choice:
            self._blocks = tuple(choice)
            options = torch.stack([each.argmax(1) for each in choice.values()], dim=1)
            self._counts.update(map(tuple, options.tolist()))

    def read(self) -> InputDependence | None:
        """Over all processes; a collective. ``None`` where no batch had a choice."""
        parts: Sequence[tuple[tuple[str, ...], Counter[tuple[int, ...]]]]
        parts = gather_over_ranks((self._blocks, self._counts))
        total: Counter[tuple[int, ...]] = Counter()
        blocks: tuple[str, ...] = ()
        for names, counts in parts:
            total.update(counts)
            blocks = names or blocks
        if not total:
            return None
        return input_dependence(blocks, torch.tensor(list(total)), torch.tensor(list(total.values())))


def input_dependence(
    blocks: Sequence[str], configurations: Int[Tensor, "configurations blocks"], counts: Int[Tensor, " configurations"]
) -> InputDependence:
    """From each configuration that occurs, as the number of every block's option, and how many samples have it."""
    options = int(configurations.max()) + 1
    information = {}
    for block, chosen in zip(blocks, configurations.unbind(1), strict=True):
        information[block] = entropy_bits(torch.zeros(options).index_add(0, chosen, counts.float()))
    return InputDependence(information, len(counts), float(counts.max()) / float(counts.sum()))


def entropy_bits(counts: Float[Tensor, " values"]) -> float:
    """Entropy in bits of the shares that counts make."""
    shares = counts.double() / counts.sum()
    return float(torch.special.entr(shares).sum()) / math.log(2)
