"""Watch the numbers of a run; name the op behind a loss that is not finite or that jumps."""

from __future__ import annotations

from collections import deque
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

from torch import Tensor

from fractrain_fx.engine import Engine
from fractrain_fx.errors import NonFiniteLossError, next_sentence
from fractrain_fx.numerics import examine
from fractrain_fx.training.objective import Objective

if TYPE_CHECKING:
    from fractrain_fx.model import FracModel

__all__ = ["Alarm"]

_COMPARED = 10  # losses that a loss is compared with
_DEVIATIONS = 6.0
_LEAST = 1.5  # times the largest of them
_SHARE = 0.1  # of the first of them: a loss of almost nothing jumps without harm


class Alarm:
    """Watches the losses that a run looks at.

    Args:
        model: the model that trains.
        objective: of the run.
        input_name: keyword of the model's input; ``None``: its first positional argument.
    """

    def __init__(self, model: FracModel, objective: Objective, input_name: str | None) -> None:
        self._model, self._objective, self._input_name = model, objective, input_name
        self._losses: deque[float] = deque(maxlen=_COMPARED)
        self._first: float | None = None

    def check(self, engine: Engine, inputs: Tensor, targets: Tensor) -> None:
        """Raise a ``NonFiniteLossError`` that names the op if a loss of the epoch so far is not finite."""
        try:
            engine.check_finite()
        except NonFiniteLossError as error:
            diagnosis = self._examine(inputs, targets)
            raise NonFiniteLossError(f"{error}{next_sentence(diagnosis)}") from error

    def jumped(self, loss: float, inputs: Tensor, targets: Tensor) -> str | None:
        """A line about a loss far above those before; ``None`` if it is not."""
        before = list(self._losses)
        self._losses.append(loss)
        if len(before) < _COMPARED:
            return None
        usual, spread = fmean(before), pstdev(before)
        self._first = usual if self._first is None else self._first
        if loss < max(usual + _DEVIATIONS * spread, _LEAST * max(before), _SHARE * self._first):
            return None
        self._losses.clear()  # the next line only after as many losses
        return f"  the loss jumped from about {usual:.3g} to {loss:.3g}: {self._examine(inputs, targets)}"

    def _examine(self, inputs: Tensor, targets: Tensor) -> str | None:
        if self._model._state.sharding is not None:  # no process has whole weights
            return None
        named = inputs if self._input_name is None else {self._input_name: inputs}
        return examine(self._model, (named, targets), self._objective.criterion)
