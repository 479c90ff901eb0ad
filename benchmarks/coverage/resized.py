"""Check that a rewritten model equals its original at another size, or refuses that size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from benchmarks.coverage.checks import cause, difference
from benchmarks.coverage.sizes import Kind, Variant
from fractrain_fx.capture.recording.patch import plain_paths
from fractrain_fx.capture.state import Snapshot
from fractrain_fx.errors import InputError

__all__ = ["DIFFERENT", "EQUAL", "ERROR", "OWN", "REFUSED", "Pair", "summary", "worst"]

# The outcomes from worst to best; only the first two are failures.
_OUTCOMES = DIFFERENT, ERROR, REFUSED, EQUAL, OWN = (
    *("silently different", "raw error", "refused", "equal", "the model itself refuses"),
)


@dataclass(frozen=True)
class Pair:
    """A model and its rewrite with ``method="float"``.

    Attributes:
        model: the original.
        rewritten: shares its parameters.
        snapshot: the state that each call starts from.
        passed: names of the keyword arguments that a user passes; arguments that capture adds only go to the model.
    """

    model: nn.Module
    rewritten: nn.Module
    snapshot: Snapshot
    passed: frozenset[str]

    def at(self, variant: Variant, run: Callable[..., list[Tensor]]) -> tuple[str, str]:
        """The outcome of a call at another size, and the reason.

        Args:
            variant: the call.
            run: gives a model's outputs in one mode.
        """

        def original(value_free: bool = False) -> list[Tensor]:
            with self.snapshot.preserved(), plain_paths(value_free=value_free):
                return run(self.model, variant.args, variant.kwargs)

        try:
            theirs = original()
        except Exception:  # a model may raise anything for a size that it does not take
            return OWN, ""
        given = {name: value for name, value in variant.kwargs.items() if name in self.passed}
        try:
            with self.snapshot.preserved():
                mine = run(self.rewritten, variant.args, given)
        except InputError as error:
            return REFUSED, cause(error)
        except Exception as error:  # this error is not from fractrain_fx
            return ERROR, f"{run.__name__}: {cause(error)}"
        words = difference(theirs, mine, "outputs")
        # A model that is told not to read values may take another path to the same result, which capture records.
        if words is None or difference(original(value_free=True), mine, "outputs") is None:
            return EQUAL, ""
        if difference(theirs, original(), "outputs") is not None:
            return EQUAL, "the model itself differs between two runs of one seed"
        return DIFFERENT, f"{run.__name__}: {words}"


def worst(outcomes: Iterable[tuple[str, str]]) -> tuple[str, str]:
    """The worst outcome of a call in both modes, and the reason."""
    return min(outcomes, key=lambda outcome: _OUTCOMES.index(outcome[0]))


def summary(outcomes: Mapping[str, str], *kinds: Kind) -> str:
    """One word for the outcomes of all calls at other sizes of some kinds.

    Args:
        outcomes: the outcome for each variant's label.
        kinds: the kinds of sizes to look at.

    Returns:
        ``equal``, ``tied`` (refused at every size that the model takes), ``equal or refused``, or the failure if there
        is one; empty if the model itself takes no other size.
    """
    seen = {outcome for label, outcome in outcomes.items() if label.startswith(kinds)} - {OWN}
    for failure in (DIFFERENT, ERROR):
        if failure in seen:
            return failure
    return {0: "", 1: EQUAL if EQUAL in seen else "tied", 2: "equal or refused"}[len(seen)]
