"""Compare recordings with the model on the first call of each kind (sizes, types, layouts), and now and then.

The first calls find what recording does not see a model read; later ones find that it has changed since.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable
from typing import TypeVar

import torch
from torch import nn

from fractrain_fx.capture.checking.first_call import Errors
from fractrain_fx.capture.source import warn
from fractrain_fx.engine.distributed import syncs_batch_norm
from fractrain_fx.errors import InputError
from fractrain_fx.model.recordings.variant import Call, Variant

__all__ = ["ComparedCalls", "decided_by_values"]

T = TypeVar("T")

_FIRST = 8  # the first call that is compared again

_LOG = logging.getLogger(__name__)


class ComparedCalls:
    """Says how a recording differs from the model, on the first call of each kind and on one of ``every`` calls.

    First calls that are new in more than their sizes (in a type, a layout, a setting of torch, the mode) are few, and
    are always compared. Of those that are new in their sizes alone, the first ``limit`` of each recording are. A model
    that once differed reads sizes in a way that recording does not see: for it there is no limit.

    Args:
        model: the model that was recorded.
        limit: the number of such calls; 0 compares no call at all.
        every: of so many calls one is compared, whatever its kind, and the calls 8, 16, 32, ... before the first of
            these; 0 compares first calls alone.

    Attributes:
        differed: whether a recording differed from the model although its guards held.
        runs: the number of comparisons.
    """

    def __init__(self, model: nn.Module, limit: int, every: int) -> None:
        self._model, self._limit, self._every = model, limit, every
        self._calls = 0
        self._kinds: set[Hashable] = set()
        self._counts: Counter[int] = Counter()
        self.differed = False
        self.runs = 0

    def difference_on_first(self, variant: Variant, call: Call, training: bool, kind: Hashable) -> str | None:
        """The difference on a call, in words; ``None`` if there is none, or if the call is not a first one.

        Args:
            variant: the recording.
            call: positional and keyword arguments.
            training: the mode.
            kind: all that decides what code computes, without sizes.

        Raises:
            InputError: they differ on a call of this form with other values.
        """
        if not self._compares(variant):
            return None
        new = (id(variant), kind) not in self._kinds
        if not new and not self.differed and self._counts[id(variant)] >= self._limit:
            if self._counts[id(variant)] == self._limit:
                self._counts[id(variant)] += 1
                _LOG.warning(
                    "%s computed what its graph computes on %d calls of new sizes; calls of other sizes are no longer "
                    "compared (run.compared_calls)",
                    type(self._model).__name__,
                    self._limit,
                )
            return None
        self._counts[id(variant)] += not new
        difference = self._difference(variant, call, training)
        self.differed |= difference is not None
        compares_values = new and difference is None
        if compares_values and (other := variant.recording.value_difference(self._model, *call, training)):
            raise decided_by_values(self._model, f"with other values in its inputs {other}")
        self._kinds.add((id(variant), kind))
        return difference

    def count(self, variant: Variant, call: Call, training: bool) -> None:
        """Count a call, and compare it if it is its turn; warns if the model computes something else than its graph."""
        number = self._calls = self._calls + 1
        if not self._every or (number % self._every and not _is_early(number, self._every)):
            return
        if not self._compares(variant):
            return
        if difference := self._difference(variant, call, training, "model"):  # an error of the graph shows by itself
            warn(
                f"{type(self._model).__name__} now differs from its graph, which was compared on call {number} "
                f"(run.compare_every): {difference}. Something that its code reads has changed "
                "since it was recorded, without effect on the rewritten model, or its code uses values of tensors as "
                "numbers of Python: call fractrainify(model.restore()) again for a change to count"
            )

    def _difference(self, variant: Variant, call: Call, training: bool, errors: Errors = "both") -> str | None:
        self.runs += 1
        return variant.recording.difference(self._model, *call, training, errors)

    def _compares(self, variant: Variant) -> bool:
        if not self._limit or not variant.recording.checked or torch._C._get_tracing_state() is not None:
            return False
        if torch._C._functorch.maybe_current_level() is not None:
            return False
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return False
        return not syncs_batch_norm(self._model)


def _is_early(number: int, every: int) -> bool:
    """Whether a call is one of 8, 16, 32, ... below ``every``, which short runs reach too."""
    return _FIRST <= number < every and number & (number - 1) == 0


def decided_by_values(model: nn.Module, difference: str) -> InputError:
    """The error for a model that differs from its graph although all is as in a call on which it equals the graph."""
    return InputError(
        f"{type(model).__name__} differs from its graph where only values can be the cause: {difference}. Its code "
        "uses values of tensors as numbers or text of Python, or something else has changed since it was recorded. "
        "Compute with tensors, or move that code into a submodule and put a forward hook on it, which keeps it one "
        "call; if you have changed the model, call fractrainify(model.restore()) again"
    )
