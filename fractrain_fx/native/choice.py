"""What ``backend="auto"`` stands for: C++ kernels on a CPU, Triton kernels on a GPU, or plain torch operations."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch

from fractrain_fx.config import Backend, FracConfig
from fractrain_fx.errors import ConfigError
from fractrain_fx.native.build import distrusted, is_built, lacking_programs

__all__ = [
    "MEANING",
    "REPORTED",
    "RoundingChoice",
    "choose_rounding",
    "has_triton_package",
    "kernel_devices",
    "mark_reported",
    "tell_rounding",
]

_LOG = logging.getLogger(__name__)

MEANING = "FRACTRAIN_BACKEND"
"""The environment variable that fixes what ``auto`` stands for: ``plain``, ``cuda`` or ``cpu``."""

_TRITON = "it comes with torch's builds for GPUs on Linux (elsewhere, pip install triton)"

REPORTED: set[RoundingChoice] = set()
"""Choices that this process need not warn of again."""

Used = Literal["plain", "cuda", "cpu"]

_ASKED: dict[Backend, Used] = {"plain": "plain", "cpu": "cpu", "cuda": "cuda"}
_ASKED |= {"codes": "cpu", "codes-always": "cpu"}  # only C++ kernels multiply codes


@dataclass(frozen=True)
class RoundingChoice:
    """How a model rounds.

    Attributes:
        asked: the configuration's ``run.backend``.
        used: ``plain``, ``cuda`` or ``cpu``.
        device: type of the device that the model is on.
        reason: words for ``asked="auto"``; empty otherwise, and where there is nothing to choose.
        hint: whether building the kernels would make this model quicker.
    """

    asked: Backend
    used: Used
    device: str
    reason: str = ""
    hint: bool = False

    def __str__(self) -> str:
        kernels = {("cpu", "cpu"): "C++", ("cpu", "cuda"): "Triton", ("cuda", "cuda"): "Triton"}
        kind = kernels.get((self.used, self.device))
        how = f"by {kind} kernels" if kind else "by plain torch operations"
        return f"rounds {how} (run.backend={self.asked!r}: {self.reason})"


def choose_rounding(config: FracConfig, device: torch.device) -> RoundingChoice:
    """How a model on ``device`` rounds. Nothing is built for ``auto``.

    Raises:
        ConfigError: the environment variable has another value than ``plain``, ``cuda`` or ``cpu``, or Triton
            is asked for and not installed.
    """
    backend, here = config.run.backend, device.type
    fixed = os.environ.get(MEANING) if backend == "auto" and config.rounds_by_kernels else None
    if "cuda" in (backend, fixed) and not has_triton_package():
        raise ConfigError(f"run.backend='cuda' needs Triton: {_TRITON}, or write run.backend='plain'")
    if backend != "auto":
        return RoundingChoice(backend, _ASKED[backend], here)
    if not config.rounds_by_kernels:
        return RoundingChoice(backend, "plain", here)
    known: dict[str, Used] = {"plain": "plain", "cuda": "cuda", "cpu": "cpu"}
    if fixed in known:
        return RoundingChoice(backend, known[fixed], here, f"{MEANING} is {fixed!r}")
    if fixed:
        raise ConfigError(f"the environment variable {MEANING}={fixed!r} is unknown: write plain, cuda or cpu")
    # Where a model is on a CPU now, it may move to a GPU later.
    otherwise: Used = "cuda" if has_triton_package() else "plain"
    if here == "cuda":
        triton = "it is installed" if has_triton_package() else f"Triton is not installed: {_TRITON}"
        return RoundingChoice(backend, otherwise, here, triton)
    if here != "cpu":
        return RoundingChoice(backend, "plain", here, f"there are no kernels for a model on {here!r}")
    if is_built() and (reason := distrusted()) is not None:
        return RoundingChoice(backend, otherwise, here, reason)
    if is_built():
        return RoundingChoice(backend, "cpu", here, "they are built")
    if lacking := lacking_programs():
        reason = f"there is no {' and no '.join(lacking)} here to build C++ kernels"
        return RoundingChoice(backend, otherwise, here, reason)
    reason = "C++ kernels are quicker, and not built yet: run 'fractrain build' once, which takes about a minute"
    return RoundingChoice(backend, otherwise, here, reason, hint=True)


@cache
def has_triton_package() -> bool:
    """Whether Triton can be imported."""
    return find_spec("triton") is not None


def kernel_devices(config: FracConfig) -> tuple[str, ...]:
    """Types of the devices on which kernels compute what a model rounds and its gates."""
    used = choose_rounding(config, torch.device("cpu")).used
    on_cpu = ("cpu",) if used == "cpu" else ()
    on_gpu = ("cuda",) if used != "plain" and has_triton_package() else ()
    return (*on_cpu, *on_gpu)


def tell_rounding(choice: RoundingChoice) -> None:
    """Write the choice for ``auto`` to the log; the first time that building would help, as a warning."""
    loud = choice.hint and choice not in REPORTED and not torch.cuda.is_available()
    mark_reported(choice)
    if choice.reason:
        _LOG.log(logging.WARNING if loud else logging.INFO, "%s", choice)


def mark_reported(choice: RoundingChoice) -> None:
    """Give no warning of this choice: a run says it in a line of its own."""
    REPORTED.add(choice)
