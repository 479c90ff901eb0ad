"""Side effects of a call: the tensors that it changed, and whether it drew random numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Effects", "Watch"]


@dataclass(frozen=True)
class Watch:
    """Tensors with their version counters before a call, and the number of draws of random numbers until then."""

    versions: tuple[tuple[Tensor, int], ...]
    draws: int

    @property
    def tensors(self) -> list[Tensor]:
        """The watched tensors."""
        return [x for x, _ in self.versions]


class Effects:
    """Watches version counters of tensors and the state of the random generators."""

    def __init__(self) -> None:
        self._random = _random_state()
        self._draws = 0

    def watch(self, tensors: Iterable[Tensor]) -> Watch:
        """Note versions and draws before a call."""
        return Watch(tuple((x, _version(x)) for x in tensors), self._draws)

    def since(self, watch: Watch) -> tuple[list[Tensor], bool]:
        """Tensors written since the watch began, and whether random numbers were drawn."""
        before, self._random = self._random, _random_state()
        self._draws += not all(map(torch.equal, before, self._random))
        return [x for x, version in watch.versions if _version(x) != version], self._draws > watch.draws


def _version(x: Tensor) -> int:
    # An inference tensor has no version, and cannot be changed outside inference mode.
    return 0 if x.is_inference() else x._version


def _random_state() -> list[Tensor]:
    states = [torch.default_generator.get_state()]
    # There are no CUDA generators before CUDA is initialised.
    states += [generator.get_state() for generator in torch.cuda.default_generators]
    return states
