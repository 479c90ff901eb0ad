"""The samples of each step of a process, as a function of seed and step, so that a run can start at any step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Int
from torch import Tensor

from fractrain_fx.errors import DataError

__all__ = ["Order", "generator_for"]


@dataclass(frozen=True)
class Order:
    """Shuffled passes over the training samples, shared out to processes.

    A step has the same samples for any number of processes with the same ``batch * ranks``. Samples that do not fill a
    step at the end of a pass are left out of that pass. With fewer samples than a step takes, each step takes all.

    Attributes:
        samples: number of samples.
        batch: samples of a step in one process.
        seed: seed of all passes.
        rank, ranks: number of this process, and of all processes.

    Raises:
        DataError: there are fewer samples than processes.
    """

    samples: int
    batch: int
    seed: int
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.samples < self.ranks:
            raise DataError(f"{self.samples} training samples are too few for {self.ranks} processes: use more of them")

    @property
    def steps(self) -> int:
        """Steps of a pass."""
        return max(1, self.samples // (self.batch * self.ranks))

    def step(self, number: int) -> tuple[int, Int[Tensor, " batch"]]:
        """The pass, counted from 0, that step ``number`` (from 0, over all passes) belongs to, and its samples."""
        turn, place = divmod(number, self.steps)
        size = min(self.batch, self.samples // self.ranks)
        first = (place * self.ranks + self.rank) * size
        return turn, _shuffled(self.samples, self.seed, turn)[first : first + size]


@lru_cache(maxsize=2)
def _shuffled(samples: int, seed: int, turn: int) -> Int[Tensor, " samples"]:
    return torch.randperm(samples, generator=generator_for(seed, turn, 0))


def generator_for(seed: int, turn: int, purpose: int) -> torch.Generator:
    """A separate generator for each seed, pass and purpose (0: order, 1: augmentation)."""
    return torch.Generator().manual_seed((seed * 1_000_003 + turn) * 2 + purpose)
