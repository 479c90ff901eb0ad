"""What ``rounding="auto"`` stands for: C++ kernels, or plain torch operations."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Literal

import torch

from fractrain_fx.config import BLOCK_FORMATS, FracConfig, Rounding
from fractrain_fx.errors import ConfigError
from fractrain_fx.native.build import is_built, lacking_programs

__all__ = [
    "MEANING",
    "RoundingChoice",
    "choose_rounding",
    "kernels_fit",
    "leave_telling",
    "tell_rounding",
    "uses_kernels",
]

_LOG = logging.getLogger(__name__)

MEANING = "FRACTRAIN_ROUNDING"
"""The environment variable that fixes what ``auto`` stands for: ``eager`` or ``compiled``."""

_TOLD: set[RoundingChoice] = set()

Used = Literal["eager", "compiled"]


@dataclass(frozen=True)
class RoundingChoice:
    """How a model rounds.

    Attributes:
        asked: the configuration's ``rounding``.
        used: ``eager`` or ``compiled``.
        reason: words for ``asked="auto"``; empty otherwise, and where there is nothing to choose.
        hint: whether building the kernels would make this model quicker.
    """

    asked: Rounding
    used: Used
    reason: str = ""
    hint: bool = False

    def __str__(self) -> str:
        how = "by C++ kernels" if self.used == "compiled" else "by plain torch operations"
        return f"rounds {how} (rounding={self.asked!r}: {self.reason})"


def kernels_fit(config: FracConfig) -> bool:
    """Whether the kernels round anything of a model: format ``affine`` with one range for a tensor, or blocks."""
    fits = config.format in BLOCK_FORMATS or (config.format == "affine" and not config.per_product)
    return config.method not in ("float", "slu") and fits


def choose_rounding(config: FracConfig, device: torch.device) -> RoundingChoice:
    """How a model on ``device`` rounds. Nothing is built for ``auto``.

    Raises:
        ConfigError: the environment variable has another value than ``eager`` or ``compiled``.
    """
    asked = config.rounding
    if asked != "auto":
        return RoundingChoice(asked, asked)
    if not kernels_fit(config):
        return RoundingChoice(asked, "eager")
    if device.type != "cpu":
        return RoundingChoice(asked, "eager", f"the kernels are for CPUs, and this model is on {device.type!r}")
    fixed = os.environ.get(MEANING)
    known: dict[str, Used] = {"eager": "eager", "compiled": "compiled"}
    if fixed in known:
        return RoundingChoice(asked, known[fixed], f"{MEANING} is {fixed!r}")
    if fixed:
        raise ConfigError(f"the environment variable {MEANING}={fixed!r} is unknown: write eager or compiled")
    if is_built():
        return RoundingChoice(asked, "compiled", "they are built")
    if lacking := lacking_programs():
        return RoundingChoice(asked, "eager", f"there is no {' and no '.join(lacking)} here to build C++ kernels")
    reason = "C++ kernels are quicker, and not built yet: run 'fractrain build' once, which takes about a minute"
    return RoundingChoice(asked, "eager", reason, hint=True)


def uses_kernels(config: FracConfig) -> bool:
    """Whether a model on a CPU rounds by kernels. On other devices they change nothing."""
    return choose_rounding(config, torch.device("cpu")).used == "compiled"


def tell_rounding(choice: RoundingChoice) -> None:
    """Write the choice for ``auto`` to the log; the first time that building would help, as a warning."""
    loud = choice.hint and choice not in _TOLD and not torch.cuda.is_available()
    leave_telling(choice)
    if choice.reason:
        _LOG.log(logging.WARNING if loud else logging.INFO, "%s", choice)


def leave_telling(choice: RoundingChoice) -> None:
    """Give no warning of this choice: a run says it in a line of its own."""
    _TOLD.add(choice)
