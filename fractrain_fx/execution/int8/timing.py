"""Times the float form and the integer form of an op on real operands, to choose the quicker one."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache, partial

import torch

from fractrain_fx.config import Kernels
from fractrain_fx.execution.int8.kept import keep, recall
from fractrain_fx.native import kernels

__all__ = ["Timing", "Tuner", "lacks_int8", "lacks_products"]

_log = logging.getLogger(__name__)

# Timed runs of each form, after one to warm up.
_RUNS = 3

# Compute capability of the first GPUs whose tensor cores multiply bytes.
_INT8_TENSOR_CORES = (7, 5)


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
        kernels: ``auto`` times both forms, ``int8`` chooses integers without timing.
        compiled: whether C++ kernels may multiply codes.

    Attributes:
        timings: the timing of each kind of product.
    """

    def __init__(self, kernels: Kernels, *, compiled: bool = False) -> None:
        self.kernels, self._compiled = kernels, compiled
        self.timings: dict[Hashable, Timing] = {}
        self._told: set[str] = set()

    def lacks(self, device: torch.device) -> str | None:
        """The reason why no op should run on integers on a device, logged once; ``None`` if there is none."""
        reason = lacks_products(device, compiled=self._compiled) if self.kernels == "auto" else None
        if reason is not None and reason not in self._told:
            self._told.add(reason)
            _log.warning("all ops compute in float, with the same numbers: %s", reason)
        return reason

    def multiplies(self, device: torch.device) -> bool:
        """Whether C++ kernels multiply codes on a device, instead of torch."""
        return self._compiled and device.type == "cpu" and _has_products()

    def int8(self, kind: Hashable, name: str, device: torch.device, forms: Callable[[bool], object]) -> bool | None:
        """Whether a kind of product should run on integers; ``None`` if it cannot be timed now.

        Args:
            kind: everything that the time depends on.
            name: the op's name, for the log.
            device: where it runs.
            forms: runs all products of the op, on integers if it is given ``True``.
        """
        if self.kernels == "int8":
            return True
        if kind not in self.timings:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return None
            key = f"{'kernels' if self._compiled else 'torch'}: {kind}"
            kept = recall(key, device)
            seconds = kept or (_seconds(partial(forms, False), device), _seconds(partial(forms, True), device))
            if kept is None:
                keep(key, device, seconds)
            timing = self.timings[kind] = Timing(*seconds)
            _log.info(
                "%s: %.3g ms in float, %.3g ms on int8%s: %s, as all of this kind: %s",
                name,
                1e3 * timing.float_s,
                1e3 * timing.int8_s,
                "" if kept is None else " in an earlier run",
                "int8" if timing.int8 else "float",
                kind,
            )
        return self.timings[kind].int8


def lacks_products(device: torch.device, *, compiled: bool) -> str | None:
    """The reason why integer products are not quicker than float ones on this kind of device; ``None`` if they may be.

    Args:
        device: where they run.
        compiled: whether C++ kernels may multiply, which a CPU without units for bytes needs.
    """
    reason = lacks_int8(device)
    if reason is None or device.type != "cpu":
        return reason
    if compiled:
        return None if _has_products() else f"{reason}, nor AVX2"
    return f"{reason}; rounding='compiled' multiplies without them"


def lacks_int8(device: torch.device) -> str | None:
    """The reason why this kind of device has no quick units for bytes; ``None`` if it has."""
    if device.type == "cpu":
        return None if torch.cpu._is_vnni_supported() else "this CPU has no dot products of bytes (VNNI)"
    if device.type == "cuda" and torch.version.hip is None:
        quick = torch.cuda.get_device_capability(device) >= _INT8_TENSOR_CORES
        return None if quick else f"{torch.cuda.get_device_name(device)} has no tensor cores for bytes"
    return f"torch cannot multiply matrices of bytes on a device of type {device.type}"


@cache
def _has_products() -> bool:
    found: bool = kernels().has_products()
    return found


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The median time of a few runs."""
    run()
    taken = []
    for _ in range(_RUNS):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
