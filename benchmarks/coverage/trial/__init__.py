"""Put one model through every check, and write down what each check found."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from benchmarks.coverage.cases import NotBuiltError, Ready
from benchmarks.coverage.checks import cause, one_line
from benchmarks.coverage.resized import DIFFERENT, ERROR, REFUSED
from benchmarks.coverage.trial import recorded, rewritten, unchanged
from benchmarks.coverage.trial.state import DifferentError, FailedError, Row, Trial
from fractrain_fx.errors import FracTrainError

__all__ = ["CHECKS", "DESCRIPTIONS", "Row", "examine", "passed"]

# Each check with the checks it needs: it is not reached if one of them did not pass.
_ORDER: tuple[tuple[Callable[[Trial], None], tuple[str, ...]], ...] = (
    (recorded.build, ()),
    (recorded.forward, ("build",)),
    (recorded.capture, ("forward",)),
    (unchanged.float_rewrite, ("capture",)),
    (unchanged.train_outputs, ("float_rewrite",)),
    (unchanged.gradients, ("train_outputs",)),
    (unchanged.buffers, ("train_outputs",)),
    (unchanged.eval_outputs, ("float_rewrite",)),
    (rewritten.rewrite, ("capture",)),
    (rewritten.table, ("rewrite",)),
    (rewritten.state_dict, ("rewrite",)),
    (rewritten.checkpoint, ("rewrite",)),
    (rewritten.restore, ("rewrite",)),
    (rewritten.training_step, ("rewrite",)),
    (rewritten.gates, ("training_step",)),
    (rewritten.evaluation, ("training_step",)),
    (rewritten.deepcopy, ("evaluation",)),
    (rewritten.save_and_load, ("evaluation",)),
    (unchanged.sizes, ("float_rewrite",)),  # the last check, because it takes the longest
)
CHECKS = tuple(check.__name__ for check, _ in _ORDER)
DESCRIPTIONS = {check.__name__: (check.__doc__ or "").partition("\n")[0].replace("``", "`") for check, _ in _ORDER}
"""The first line of the docstring of each check, for a page."""


def examine(build: Callable[[], Ready], report: Callable[[Row], None] = lambda row: None) -> Row:
    """Run all checks on one model.

    Args:
        build: makes the model and its batch.
        report: is given the row before each check, with the name of that check as ``at``: the last row reported is
            all that is known of a model whose process dies.
    """
    warnings.simplefilter("ignore")
    # The fused path of torch's attention modules in evaluation differs from their training path in the last bits.
    torch.backends.mha.set_fastpath_enabled(False)
    trial = Trial(build)
    row = trial.row
    checks: dict[str, str] = row["checks"]
    for name, (check, needs) in zip(CHECKS, _ORDER, strict=True):
        if any(checks[need] != "passed" for need in needs):
            checks[name] = "not reached"
            continue
        row["at"] = name
        report(row)
        try:
            check(trial)
            checks[name] = "passed"
        except Exception as error:  # any error of a model is a result of the sweep
            checks[name] = "failed"
            row.setdefault("failed_at", name)
            told = isinstance(error, FailedError | NotBuiltError)
            words = row.setdefault("causes", {})[name] = one_line(error) if told else cause(error)
            row.setdefault("cause", words)
            row.setdefault("verdict", _verdict(name, error))
            row["not_built"] = isinstance(error, NotBuiltError)
    row.pop("at", None)
    return row


def passed(row: Row) -> bool:
    """Whether every check was made and held. Rows older than the check at other sizes pass without it."""
    checks = {"sizes": "passed"} | row["checks"]
    return all(checks.get(name) == "passed" for name in CHECKS)


def _verdict(check: str, error: BaseException) -> str:
    """Whether the toolkit refuses the model with an error of its own, computes something else silently, or fails."""
    if isinstance(error, DifferentError):
        return DIFFERENT
    if isinstance(error, FracTrainError) and check in ("capture", "float_rewrite", "rewrite"):
        return REFUSED
    return "failed" if isinstance(error, FailedError | NotBuiltError) else ERROR
