"""When quantization noise drowns the gradient: the threshold of arXiv 2505.19115, and its measurement."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from fractrain_fx.engine.distributed import is_sharded, sum_over_ranks, world_size
from fractrain_fx.errors import ConfigError, RunError
from fractrain_fx.nn.rounding import unrounded_gradients

__all__ = ["GradientNoiseSchedule", "GradientProbe", "GradientSchedule"]

_THRESHOLD = math.sqrt(3)


@runtime_checkable
class GradientSchedule(Protocol):
    """A schedule that is also told how large gradients are beside the error that rounding adds to them."""

    @property
    def wants_gradients(self) -> bool:
        """Whether it needs the numbers of the present window."""
        ...

    def see_gradients(self, norm: float, noise: float) -> None:
        """Take the norm of an optimizer step's gradient, and that of its rounding error, before ``update``."""
        ...


class GradientNoiseSchedule:
    """The next stage as soon as the gradient's norm is below sqrt(3) times that of its quantization noise."""

    def __init__(self, stages: int) -> None:
        self._last = stages - 1
        self._stage = 0
        self._ratio: float | None = None

    @property
    def wants_gradients(self) -> bool:
        return self._stage < self._last

    def see_gradients(self, norm: float, noise: float) -> None:
        self._ratio = norm / noise if noise else None

    def update(self, loss: float) -> int:
        if self._ratio is not None and self._ratio < _THRESHOLD and self._stage < self._last:
            self._stage += 1
        self._ratio = None
        return self._stage

    def state_dict(self) -> dict[str, Any]:
        return {"stage": self._stage, "ratio": self._ratio}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._stage, self._ratio = int(state["stage"]), state["ratio"]


class GradientProbe:
    """Measures the gradient of an optimizer step, and the error that the rounding of backward adds to it.

    The error is the difference of two backward passes through one forward pass: as trained, and with nothing rounded
    that the forward pass had not rounded. Both are summed over the batches and processes of the step before norms are
    taken, because noise averages out over them. That takes two more backward passes, and memory for two more copies of
    the gradients, in the steps that are measured.

    Args:
        model: has the trained parameters. Gates are left out: no format rounds their gradients.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._sums: tuple[list[Tensor], list[Tensor]] | None = None

    def add(self, loss: Tensor, weight: float) -> None:
        """Take a batch, whose loss the loop divides by ``weight``.

        Raises:
            ConfigError: parameters are sharded.
        """
        named = dict(self._model.named_parameters()).items()
        trained = [each for name, each in named if each.requires_grad and not name.startswith("frac.")]
        if any(map(is_sharded, trained)):
            raise ConfigError(
                "schedule='gradient-noise' needs the gradients of whole parameters, and these are sharded: write "
                "schedule='auto' or 'fixed'"
            )
        noisy = _gradients(loss, trained, weight)
        with unrounded_gradients():
            error = [a - b for a, b in zip(noisy, _gradients(loss, trained, weight), strict=True)]
        if self._sums is not None:
            noisy, error = _added(noisy, self._sums[0]), _added(error, self._sums[1])
        self._sums = noisy, error

    def read(self) -> tuple[float, float] | None:
        """Norms of the gradient and of its error in the step that ends; ``None`` if it was not measured. A collective.

        Raises:
            RunError: backward rounds nothing here that can be left unrounded, as in compiled models.
        """
        if self._sums is None:
            return None
        norms = []
        for tensors in self._sums:
            mean = [sum_over_ranks(each).div_(world_size()).norm().double() for each in tensors]
            norms.append(float(torch.stack(mean).norm()))
        self._sums = None
        norm, noise = norms
        if noise == 0 and norm > 0:
            raise RunError(
                "schedule='gradient-noise' found no rounding in backward: under torch.compile it cannot be left out, "
                "so train without it, or write schedule='auto' or 'fixed'"
            )
        return norm, noise


def _gradients(loss: Tensor, parameters: list[Tensor], weight: float) -> list[Tensor]:
    found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    full = [torch.zeros_like(own) if each is None else each for each, own in zip(found, parameters, strict=True)]
    return [each.detach().float() / weight for each in full]


def _added(tensors: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    return [each.add_(other) for each, other in zip(tensors, others, strict=True)]
