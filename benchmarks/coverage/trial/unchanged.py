"""Checks of the float rewrite: it computes what the original computes, at the recorded sizes and at others."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from benchmarks.coverage.checks import difference, evaluate, step
from benchmarks.coverage.checks import train_outputs as outputs_in_training
from benchmarks.coverage.resized import DIFFERENT, ERROR, Pair, worst
from benchmarks.coverage.sizes import variants
from benchmarks.coverage.trial.state import DifferentError, FailedError, Trial
from fractrain_fx.capture import Recording, resize_batch
from fractrain_fx.capture.checking.check import Batching
from fractrain_fx.capture.inputs.batch import batch_size
from fractrain_fx.capture.recording.patch import plain_paths

__all__ = ["buffers", "eval_outputs", "float_rewrite", "gradients", "sizes", "train_outputs"]

# Relative, and far above the difference that another order of the terms of a sum makes.
_ROUNDING = 1e-4


def float_rewrite(trial: Trial) -> None:
    """``method="float"`` rewrites the model."""
    trial.plain = trial.rewrite(_second(trial), "float")


def _second(trial: Trial) -> Recording:
    """A second recording on the model's own modules and tensors, equal to the one that ``record`` would make."""
    model = trial.model
    memo = {id(part): part for part in (*model.modules(), *model.parameters(), *model.buffers())}
    train = copy.deepcopy(trial.recording.train, memo)
    return replace(trial.recording, train=train, eval=copy.deepcopy(trial.recording.eval, memo))


def train_outputs(trial: Trial) -> None:
    """Training outputs from the same seed are equal bit for bit."""
    with trial.snapshot.preserved():
        trial.after = step(trial.plain, trial.ready.args, trial.ready.kwargs, 7)
    _require_same(trial, "outputs", trial.before.outputs, trial.after.outputs)


def gradients(trial: Trial) -> None:
    """Gradients are equal bit for bit."""
    _require_same(trial, "gradients", trial.before.gradients, trial.after.gradients)


def buffers(trial: Trial) -> None:
    """Buffers after the step are equal bit for bit."""
    _require_same(trial, "buffers", trial.before.buffers, trial.after.buffers)


def _require_same(trial: Trial, what: str, theirs: Any, mine: Any) -> None:
    words = difference(theirs, mine, what)
    if words is None:
        return
    # A model that is told not to read values may take another path to the same result. Capture records that path and
    # has compared it with the usual one up to rounding. See fractrain_fx/capture/checking/check.py.
    with trial.snapshot.preserved(), plain_paths(value_free=True):
        other = step(trial.model, trial.ready.args, trial.asked, 7)
    if difference(getattr(other, what), mine, what) is None:
        trial.row["notes"].append(f"{what} equal those of the model's path that reads no values")
        return
    with trial.snapshot.preserved():
        again = step(trial.model, trial.ready.args, trial.asked, 7)
    if difference(theirs, getattr(again, what), what) is not None:
        words += "; the model itself differs between two runs of one seed"
    elif _is_rounding(trial, what, theirs, mine):
        trial.row["notes"].append(f"{what} are equal up to rounding, as they are between two runs of the rewrite")
        return
    raise DifferentError(words)


def _is_rounding(trial: Trial, what: str, theirs: Any, mine: Any) -> bool:
    """Whether two runs of the rewrite differ by rounding too: where terms lie in memory changes the order of a sum."""
    with trial.snapshot.preserved():
        again = step(trial.plain, trial.ready.args, trial.ready.kwargs, 7)
    differs = difference(mine, getattr(again, what), what) is not None
    return differs and difference(theirs, mine, what, tolerance=_ROUNDING) is None


def eval_outputs(trial: Trial) -> None:
    """Evaluation at another batch size is equal bit for bit."""
    batches: list[dict[str, Any]] = [
        {"args": trial.ready.args, "kwargs": kwargs} for kwargs in (trial.asked, trial.ready.kwargs)
    ]
    if not trial.recording.fixed_batch:
        packed = trial.recording.batching is Batching.PACKED
        larger = (batch_size(batches, packed=packed) or 0) + 1
        batches = [resize_batch(batch, larger, packed=packed) for batch in batches]
    asked, given = batches
    with trial.snapshot.preserved():
        theirs = evaluate(trial.model, **asked)
    with trial.snapshot.preserved():
        mine = evaluate(trial.plain, **given)
    words = difference(theirs, mine, "outputs")
    if words is None:
        return
    with trial.snapshot.preserved(), plain_paths(value_free=True):
        other = evaluate(trial.model, **asked)
    if difference(other, mine, "outputs") is not None:
        raise DifferentError(words)
    trial.row["notes"].append("evaluation equals the model's path that reads no values")


def sizes(trial: Trial) -> None:
    """At other batch, sequence and image sizes the rewrite equals the model, or refuses with an error that says why.

    Sizes that the original refuses do not count.
    """
    outcomes: dict[str, str] = trial.row.setdefault("sizes", {})
    words: dict[str, str] = trial.row.setdefault("size_words", {})
    packed = trial.recording.batching is Batching.PACKED
    pair = Pair(trial.model, trial.plain, trial.snapshot, frozenset(trial.ready.kwargs))
    for variant in variants(trial.ready.args, trial.asked, packed=packed):
        outcomes[variant.label], why = worst(pair.at(variant, run) for run in (evaluate, outputs_in_training))
        words.update({variant.label: why[:300]} if why else {})
    failed = [label for label, outcome in outcomes.items() if outcome in (ERROR, DIFFERENT)]
    if failed:
        kind = DifferentError if DIFFERENT in outcomes.values() else FailedError
        raise kind("; ".join(f"{label}: {outcomes[label]}: {words[label]}" for label in failed))
