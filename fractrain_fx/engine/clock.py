"""The clock of a run: its optimizer steps and tokens, the windows that its schedule sees, and its turning points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fractrain_fx.config.clock import Amount, Tokens
from fractrain_fx.engine.distributed import sum_over_ranks
from fractrain_fx.engine.meter import EpochMeter, EpochSums
from fractrain_fx.engine.schedules import Level
from fractrain_fx.engine.steered import show_level
from fractrain_fx.errors import ConfigError, InputError, RunError

__all__ = ["RunClock", "StageChange"]


@dataclass(frozen=True)
class StageChange:
    """A turning point: in ``epoch`` (from 1) the run went from stage ``old`` to ``new`` (from 0).

    ``old_level`` and ``new_level`` are the levels of those stages: precisions, or target cp in per cent. ``step`` and
    ``tokens`` are the optimizer steps and tokens of the run before the new stage; ``None`` where a stage may change
    between epochs only, and where tokens are not counted.
    """

    epoch: int
    old: int
    new: int
    old_level: Level
    new_level: Level
    step: int | None = None
    tokens: int | None = None

    def __str__(self) -> str:
        place = "" if self.step is None else f", step {self.step}"
        place += "" if self.tokens is None else f", {self.tokens:,} tokens"
        return (
            f"epoch {self.epoch}{place}: stage {self.old + 1} -> {self.new + 1}, "
            f"{show_level(self.old_level)} -> {show_level(self.new_level)}"
        )


class RunClock:
    """Counts the optimizer steps and tokens of a run, in windows of ``every``.

    ``None``: the schedule sees epochs, and nobody needs to count steps.
    """

    def __init__(self, every: Amount | None) -> None:
        self.every = every
        self.steps = 0
        """Optimizer steps so far; a step counts only if the loop calls ``end_step`` after it."""
        self.tokens = 0
        """Tokens so far over all processes, if windows are of tokens."""
        self._batches = self._open = 0
        self._window = EpochMeter()

    def add(self, loss: Tensor, samples: int, cost_term: Tensor | None = None, labels: Tensor | None = None) -> None:
        """Add a batch to the open window, as :meth:`EpochMeter.add`."""
        if self.every is not None:
            self._window.add(loss, None, samples, cost_term, labels)

    def close_window(self) -> EpochSums:
        """The mean loss and cost term of the window that ends, over all processes; a collective."""
        sums, self._window = self._window.read(), EpochMeter()
        return sums

    def batch(self, tokens: int | None, accumulate: int) -> None:
        """Count a batch of the present optimizer step; refused if the loop does not say when steps end."""
        if self.every is None:
            return
        if self._batches >= accumulate:
            raise RunError(
                f"every={str(self.every)!r} counts optimizer steps, and {self._batches + 1} batches came without "
                "their end: call engine.end_step() after each optimizer.step(), or say how many batches make a step "
                f"(accumulate={accumulate} now)"
            )
        self._batches += 1
        if isinstance(self.every, Tokens):
            if tokens is None:
                raise InputError(
                    f"every={str(self.every)!r} counts tokens, and no input of the model is a matrix of tokens: write "
                    "engine.loss(loss, tokens=...), or count steps"
                )
            self._open += tokens

    def abandon_step(self) -> None:
        """Forget the batches of an optimizer step that did not end."""
        self._batches = self._open = 0

    def end_step(self) -> bool:
        """Close the optimizer step; returns whether a window ends with it. With tokens it is a collective."""
        if self.every is None:
            self.steps += 1
            return False
        if not self._batches:
            raise RunError("end_step was called without a batch before it: call engine.loss for each batch of a step")
        before = self._position
        self.steps += 1
        if isinstance(self.every, Tokens):
            self.tokens += int(sum_over_ranks(torch.tensor(self._open)))
        self._batches = self._open = 0
        if self._position - before > self.every.number:
            raise ConfigError(
                f"every={str(self.every)!r} is less than the {self._position - before} tokens of one optimizer step: "
                "write a larger number, or every='1 step'"
            )
        return self._position // self.every.number > before // self.every.number

    @property
    def place(self) -> tuple[int | None, int | None]:
        """Steps and tokens as a :class:`StageChange` has them."""
        if self.every is None:
            return None, None
        return self.steps, self.tokens if isinstance(self.every, Tokens) else None

    def state_dict(self) -> dict[str, Any]:
        """Steps and tokens so far, and the open window; taken between optimizer steps. Within a window a collective."""
        window = {"window": self._window.state_dict()} if self._window.steps else {}
        return {"steps": self.steps, "tokens": self.tokens, **window}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` gave."""
        self.steps, self.tokens = int(state["steps"]), int(state["tokens"])
        self.abandon_step()
        self._window = EpochMeter()
        if "window" in state:
            self._window.load_state_dict(state["window"])

    @property
    def _position(self) -> int:
        return self.tokens if isinstance(self.every, Tokens) else self.steps
