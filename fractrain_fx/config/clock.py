"""Lengths in optimizer steps and in tokens: when the stage may change, how long a run is, where its stages begin."""

from __future__ import annotations

import re
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, TypeAlias

from fractrain_fx.errors import ConfigError

__all__ = ["Amount", "Steps", "Tokens", "parse_amount", "parse_turn"]


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
        return parse_amount("schedule.turns", value)
