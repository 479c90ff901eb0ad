"""Name the op that a loss which is not finite, or jumps, comes from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median_high

from fractrain_fx.numerics.findings import Finding, find
from fractrain_fx.numerics.records import OperandRecord, WatchedStep

__all__ = ["blame"]

_NAMES = {"x": "the input x", "w": "the second operand w", "g": "the gradient of the output", "y": "the output"}


def blame(steps: Sequence[WatchedStep], where: str | None = None) -> str | None:
    """The operand that was first not finite in the last step, or else furthest out; ``None`` without steps.

    ``where`` names the step in the sentence.

    Furthest out is the operand that grew most since the step before, or whose largest value is furthest above that of
    the same operand of the other ops.
    """
    if not steps or not steps[-1].operands:
        return None
    last = steps[-1]
    where = where or f"in watched step {last.step}"
    if (first := _first_beyond(last)) is not None:
        return f"{where}, {_NAMES[first.operand]} of {first.op} in {first.product} was first out: {first.why}"
    before = {_key(record): record.statistics.largest for record in (steps[-2].operands if len(steps) > 1 else ())}
    records = [record for record in last.operands if not record.as_if and record.statistics.largest > 0]
    if not records:
        return None
    letters = {record.operand for record in records}
    usual = {letter: median_high(r.statistics.largest for r in records if r.operand == letter) for letter in letters}

    def growth(record: OperandRecord) -> float:
        return record.statistics.largest / (before.get(_key(record)) or usual[record.operand])

    worst = max(records, key=growth)
    against = "what it was in the watched step before" if before.get(_key(worst)) else "what is usual in other ops"
    return (
        f"{where}, all values were finite, and {_NAMES[worst.operand]} of {worst.op} was furthest out: it reached "
        f"{worst.statistics.largest:.3g}, {growth(worst):.2g} times {against}"
    )


def _first_beyond(step: WatchedStep) -> Finding | None:
    """The operand that is first not finite, or of another size than those of the other ops."""
    order = list(dict.fromkeys(record.op for record in step.operands))
    findings = find(step.operands, order, math.inf)
    bad = [finding for finding in findings if finding.kind == "not finite"]
    return next(iter(bad or [finding for finding in findings if finding.kind == "magnitude"]), None)


def _key(record: OperandRecord) -> tuple[str, str, tuple[str, ...]]:
    return record.op, record.operand, record.products
