"""Times the float form and the integer form of an op on real operands, to choose the quicker one."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from fractrain_fx.config import FracConfig
from fractrain_fx.execution.codes.kept import keep, recall
from fractrain_fx.formats.scratch import Order
from fractrain_fx.native import kernels

__all__ = ["Timing", "TimingKey", "Tuner", "lacks_products"]

_log = logging.getLogger(__name__)

# Timed runs of each form, after one to warm up.
_RUNS = 3


class TimingKey(NamedTuple):
    """Everything that the time of the form on codes and of the form in float depends on.

    Attributes:
        layout: how the contraction is a product of rows.
        rows: rows of the output, rounded up to a power of two.
        outputs, inner: output channels, and values in a row of the activation.
        gated: whether samples have bits of their own.
        widths: bits of activation, weight and gradient: the kernels take less time for fewer. Bits that samples choose
            are not told apart, because they may change in each step.
        needs: which gradients are asked for.
        order: the order in memory of the rounded activation in float.
        dtype: type of the result.
    """

    layout: object
    rows: int
    outputs: int
    inner: int
    gated: bool
    widths: tuple[int, int, int]
    needs: tuple[bool, bool, bool]
    order: Order
    dtype: torch.dtype


@dataclass(frozen=True)
class Timing:
    """Seconds that each form takes."""

    float_s: float
    int8_s: float

    @property
    def int8(self) -> bool:
        """Whether integers took less time."""
        return self.int8_s < self.float_s


class Tuner:
    """The choices of one model: a timing for each kind of product, kept from an earlier run or made as one trains.

    Args:
        always: choose integers without timing.

    Attributes:
        timings: the timing of each kind of product.
    """

    def __init__(self, *, always: bool = False) -> None:
        self.always = always
        self.timings: dict[Hashable, Timing] = {}
        self._lacking: dict[str, str | None] = {}

    @classmethod
    def of(cls, config: FracConfig) -> Tuner:
        """The tuner of a model with a configuration."""
        return cls(always=config.run.backend == "codes-always")

    def lacks(self, device: torch.device) -> str | None:
        """The reason why no op can run on integers on a device, logged once; ``None`` if there is none."""
        if device.type not in self._lacking:
            reason = self._lacking[device.type] = lacks_products(device)
            if reason is not None:
                _log.warning("all ops compute in float, with the same numbers: %s", reason)
        return self._lacking[device.type]

    def int8(self, kind: Hashable, name: str, forms: Callable[[bool], object]) -> bool:
        """Whether a kind of product should run on integers.

        Args:
            kind: everything that the time depends on.
            name: the op's name, for the log.
            forms: runs all products of the op, on integers if it is given ``True``.
        """
        if self.always:
            return True
        if kind not in self.timings:
            key = str(kind)
            earlier = recall(key)
            seconds = earlier or (_seconds(partial(forms, False)), _seconds(partial(forms, True)))
            if earlier is None:
                keep(key, seconds)
            timing = self.timings[kind] = Timing(*seconds)
            _log.info(
                "%s: %.3g ms in float, %.3g ms on int8%s: %s, as all of this kind: %s",
                name,
                1e3 * timing.float_s,
                1e3 * timing.int8_s,
                "" if earlier is None else " in an earlier run",
                "int8" if timing.int8 else "float",
                kind,
            )
        return self.timings[kind].int8


def lacks_products(device: torch.device) -> str | None:
    """The reason why no kernel multiplies codes on a device; ``None`` if one does."""
    if device.type != "cpu":
        return f"only a CPU multiplies codes, by C++ kernels, and this is a device of type {device.type}"
    return None if kernels().has_products() else "the C++ kernels multiply codes by AVX2, which this CPU lacks"


def _seconds(run: Callable[[], object]) -> float:
    """The median time of a few runs."""
    run()
    taken = []
    for _ in range(_RUNS):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
