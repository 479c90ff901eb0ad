"""Schedules: what moves a run from stage to stage. Each has only the settings that it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, Literal

from fractrain_fx.config.clock import Amount, parse_amount, parse_turn
from fractrain_fx.config.kinds import check_kinds, made, require_sequence
from fractrain_fx.errors import ConfigError, near

__all__ = [
    "SCHEDULES",
    "ByLength",
    "Constant",
    "Cyclic",
    "Fixed",
    "LossPlateau",
    "Manual",
    "Plateau",
    "Schedule",
    "TwoStage",
    "parse_schedule",
]

Indicator = Literal["task", "total"]


@dataclass(frozen=True)
class Schedule:
    """What every schedule has.

    Attributes:
        every: how often the schedule is asked for the stage: ``Steps(100)`` (``100 steps``) or ``Tokens(1_000_000)``;
            ``None``: after each epoch. It then gets the mean loss since it was last asked.
    """

    every: Amount | None = field(default=None, kw_only=True)

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        check_kinds(self, "schedule.")
        if self.every is not None:
            object.__setattr__(self, "every", parse_amount("schedule.every", self.every))

    @property
    def by_total_loss(self) -> bool:
        """Whether the loss that it gets has the cost term in it."""
        return False

    @property
    def divides(self) -> bool:
        """Whether it divides the run into parts, so that the length of the run must be known."""
        return False


@dataclass(frozen=True)
class Plateau(Schedule):
    """A schedule that may follow Algorithm 1."""

    epsilon: float = 0.05
    alpha: float = 0.3
    indicator: Indicator = "task"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, inside in (("epsilon", self.epsilon >= 0), ("alpha", 0 <= self.alpha <= 1)):
            if not inside:
                raise ConfigError(
                    f"schedule.{name}={getattr(self, name)} must lie in 0..{'1' if name == 'alpha' else ''}"
                )

    @property
    def by_total_loss(self) -> bool:
        return self.indicator == "total"


@dataclass(frozen=True)
class ByLength(Plateau):
    """``LossPlateau`` within bounds that follow from the length of the run; the default, ``by-length``.

    The last stage begins at 40 % of the run at the soonest, and with equal parts of the run at the latest (of four
    stages at 75 %); the others in proportion. A run of unknown length has no bounds.

    Attributes:
        epsilon: threshold of the turning point (Algorithm 1).
        alpha: decay of that threshold (Algorithm 1).
        indicator: the loss that moves the stages. ``task``: the task loss. ``total``: the task loss plus the cost term
            of the gates, as in the authors' code.
        every: how often the schedule is asked for the stage: ``Steps(100)`` (``100 steps``) or ``Tokens(1_000_000)``;
            ``None``: after each epoch. It then gets the mean loss since it was last asked.
    """

    kind = "by-length"


@dataclass(frozen=True)
class LossPlateau(Plateau):
    """Algorithm 1: the next stage begins when the loss has stopped falling; ``auto``. Fields as ``ByLength``."""

    kind = "auto"


@dataclass(frozen=True)
class TwoStage(Plateau):
    """Algorithm 1 over the first and the last stage; ``two-stage``. Fields as ``ByLength``."""

    kind = "two-stage"


@dataclass(frozen=True)
class Manual(Schedule):
    """Each stage gets the same time; ``manual``."""

    kind = "manual"
    divides = True


@dataclass(frozen=True)
class Cyclic(Schedule):
    """Cosine cycles from the first stage to the last; ``cyclic``.

    Attributes:
        cycles: their number.
    """

    cycles: int = 8

    kind = "cyclic"
    divides = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cycles < 1:
            raise ConfigError(f"schedule.cycles={self.cycles} must be at least 1")


@dataclass(frozen=True)
class Fixed(Schedule):
    """Stages begin at set places; ``fixed``.

    Attributes:
        turns: where each stage after the first begins: shares of the run (``0.75``), or ``Steps`` or ``Tokens``, as
            ``every`` counts. A stage begins when the schedule is next asked.
    """

    turns: tuple[float | Amount, ...] = ()

    kind = "fixed"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_sequence("schedule.turns", self.turns, "[0.75]")
        object.__setattr__(self, "turns", tuple(parse_turn(turn) for turn in self.turns))
        if not self.turns:
            raise ConfigError("a fixed schedule begins stages at set places: write Fixed([0.75]) or Fixed([Steps(99)])")
        shown = f"schedule.turns=({', '.join(map(str, self.turns))})"
        shares = [turn for turn in self.turns if isinstance(turn, float)]
        amounts = [turn for turn in self.turns if not isinstance(turn, float)]
        if not all(0 < share < 1 for share in shares):
            raise ConfigError(f"{shown} must be shares of the run between 0 and 1, or numbers of steps")
        if any(self.every is None or type(turn) is not type(self.every) for turn in amounts):
            unit = amounts[0].unit
            raise ConfigError(f"{shown} in {unit} need a schedule that counts {unit}: write every='100 {unit}'")
        for places in (shares, [turn.number for turn in amounts]):
            if any(before >= after for before, after in pairwise(places)):
                raise ConfigError(f"{shown} must rise")

    @property
    def divides(self) -> bool:
        return any(isinstance(turn, float) for turn in self.turns)


@dataclass(frozen=True)
class Constant(Schedule):
    """The last stage only; ``constant``."""

    kind = "constant"


SCHEDULES: dict[str, type[Schedule]] = {
    schedule.kind: schedule for schedule in (ByLength, LossPlateau, TwoStage, Manual, Cyclic, Fixed, Constant)
}
"""The schedules by the word that names them."""


def parse_schedule(value: Any) -> Schedule:
    """A schedule from itself, from its word, or from a mapping with its word as ``kind``; ``None`` is ``by-length``.

    Raises:
        ConfigError: the word or a field is unknown, or a value does not fit.
    """
    if isinstance(value, Schedule):
        return value
    settings = dict(value) if isinstance(value, Mapping) else {"kind": value}
    word = settings.pop("kind", None) or ByLength.kind
    if not isinstance(word, str) or word not in SCHEDULES:
        offer = near(str(word), SCHEDULES)
        raise ConfigError(
            f"schedule={word!r} is unknown: write one of {', '.join(SCHEDULES)}, or one such as Manual().{offer}"
        )
    return made(SCHEDULES[word], settings)
