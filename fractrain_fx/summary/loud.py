"""What a reader must not miss: much that stays float, is not counted, or is spent on gates; misplaced samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fractrain_fx.passes import Op
from fractrain_fx.passes.analyse.sequence_first import sequence_first_words

__all__ = ["loud_line"]

# At the default targets of 1.5 to 3 %, float ops of this share cost several times what all others do.
_MUCH_FLOAT = 0.10
_DEAR_GATES = 0.05
_NAMED = 2


def loud_line(ops: Sequence[Op], gate_macs: int, misplaced: Sequence[str], method: str) -> str:
    """One line about all of these that hold; empty if none does.

    Args:
        ops: all contractions.
        gate_macs: MACs of all gates for one sample.
        misplaced: modules that take the sequence first and get the samples there.
        method: the method; under ``float`` everything stays float on purpose.
    """
    parts = [sequence_first_words(misplaced)] if misplaced else []
    parts += [*(_float(ops) if method != "float" else ()), *_uncounted(ops)]
    total = sum(op.macs or 0 for op in ops)
    if gate_macs > _DEAR_GATES * total:
        parts.append(f"gates cost {100 * gate_macs / max(total, 1):.1f} % of the model's MACs, which no cp includes")
    return f"ATTENTION: {'; '.join(parts)}" if parts else ""


def _float(ops: Sequence[Op]) -> Iterator[str]:
    total = max(sum(op.macs or 0 for op in ops), 1)
    reasons: dict[str, int] = {}
    for op in ops:
        if op.precision.mode == "float":
            reasons[op.precision.reason] = reasons.get(op.precision.reason, 0) + (op.macs or 0)
    share = sum(reasons.values()) / total
    if share > _MUCH_FLOAT:
        largest = sorted(reasons, key=lambda reason: -reasons[reason])[:_NAMED]
        told = ", ".join(f"{100 * reasons[reason] / total:.1f} %: {reason}" for reason in largest)
        yield f"{100 * share:.1f} % of the MACs stay float and keep their full cost ({told})"


def _uncounted(ops: Sequence[Op]) -> Iterator[str]:
    names = [op.name for op in ops if op.macs is None]
    if names:
        more = ", ..." if len(names) > _NAMED else ""
        are = "contraction is" if len(names) == 1 else "contractions are"
        yield f"{len(names)} {are} not counted in any share ({', '.join(names[:_NAMED])}{more})"
