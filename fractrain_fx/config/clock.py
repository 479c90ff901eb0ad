"""Lengths in optimizer steps and in tokens: when the stage may change, how long a run is, where its stages begin."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from fractrain_fx.errors import ConfigError

if TYPE_CHECKING:
    from fractrain_fx.config import FracConfig

__all__ = ["Amount", "Steps", "Tokens", "check_clock", "parse_amount", "parse_turn", "windows_of"]


@dataclass(frozen=True)
class _Length:
    number: int

    unit: ClassVar[str]

    def __post_init__(self) -> None:
        if isinstance(self.number, bool) or not isinstance(self.number, int) or self.number < 1:
            raise ConfigError(f"{type(self).__name__}({self.number!r}) must be a whole number of 1 or more")

    def __str__(self) -> str:
        return f"{self.number} {self.unit}"


class Steps(_Length):
    """A number of optimizer steps, at least 1. Prints and parses as ``100 steps``."""

    unit = "steps"


class Tokens(_Length):
    """A number of tokens over all processes, at least 1. Prints and parses as ``1000000 tokens``."""

    unit = "tokens"


Amount: TypeAlias = Steps | Tokens

_KINDS: dict[str, type[Steps] | type[Tokens]] = {"step": Steps, "token": Tokens}


def parse_amount(name: str, value: Any) -> Amount:
    """Read ``100 steps`` or ``1_000_000 tokens``.

    Args:
        name: the field that the value is for.
        value: the text, or what it stands for.
    """
    if isinstance(value, Steps | Tokens):
        return value
    match = re.fullmatch(r"\s*(\d[\d_,]*)[\s-]*(step|token)s?\s*", str(value), flags=re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{name}={value!r} is not a number of steps or tokens: write Steps(100), or '100 steps'")
    return _KINDS[match[2].lower()](int(re.sub("[_,]", "", match[1])))


def parse_turn(value: Any) -> float | Amount:
    """Read a place of a run: a share of it (``0.75``), or a number of steps or tokens."""
    if isinstance(value, Real) and not isinstance(value, bool):
        return float(value)
    try:
        return float(value)
    except (TypeError, ValueError):
        return parse_amount("turns", value)


def windows_of(config: FracConfig) -> int | None:
    """How often the schedule is asked in a run, its end included; ``None`` if the length of the run is not known."""
    if config.every is None:
        return config.epochs
    return None if config.length is None else math.ceil(config.length.number / config.every.number)


def check_clock(config: FracConfig) -> None:
    """Raise a ``ConfigError`` for ``every``, ``length`` and ``turns`` that do not fit together."""
    every, length = config.every, config.length
    if length is not None:
        if every is None:
            raise ConfigError(f"length={str(length)!r} changes nothing without every: give epochs=... instead")
        if type(length) is not type(every) or length.number < every.number:
            raise ConfigError(f"length={str(length)!r} must be at least every={str(every)!r}, in its unit")
    if config.schedule != "fixed":
        if config.turns:
            raise ConfigError(f"turns changes nothing with schedule={config.schedule!r}: it is for 'fixed'")
        return
    if not config.turns:
        raise ConfigError("schedule='fixed' begins stages at set places: write turns=(0.75,) or turns=(Steps(5000),)")
    shares = [turn for turn in config.turns if isinstance(turn, float)]
    amounts = [turn for turn in config.turns if not isinstance(turn, float)]
    if not all(0 < share < 1 for share in shares):
        raise ConfigError(f"turns={_shown(config)} must be shares of the run between 0 and 1, or numbers of steps")
    if any(every is None or type(turn) is not type(every) for turn in amounts):
        unit = amounts[0].unit
        raise ConfigError(
            f"turns={_shown(config)} in {unit} need a schedule that counts {unit}: write every='100 {unit}'"
        )
    for given in (shares, [turn.number for turn in amounts]):
        if any(before >= after for before, after in pairwise(given)):
            raise ConfigError(f"turns={_shown(config)} must rise")


def _shown(config: FracConfig) -> str:
    return f"({', '.join(map(str, config.turns))})"
