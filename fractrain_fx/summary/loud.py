"""What a reader must not miss: much that stays float, is not counted, or is spent on gates; misplaced samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fractrain_fx.config.precision import FULL
from fractrain_fx.model import FracModel
from fractrain_fx.passes import Op
from fractrain_fx.passes.analyse.sequence_first import sequence_first_words
from fractrain_fx.passes.rewrite.cost import costed

__all__ = ["float_share", "loud_line"]

# Float ops that cost more than all others together hide what a method saves.
_MUCH_FLOAT = 0.5
_DEAR_GATES = 0.05
_NAMED = 2


def float_share(model: FracModel) -> float:
    """The share (0..1) of a training step's cost that float ops take in the last stage, or at the last target."""
    config = model.frac_config
    floats = pinned = steered = 0.0
    for op, cost in costed(model.graph_module, config):
        if op.precision.mode == "float":
            floats += sum(cost.macs)
        elif op.precision.mode == "pinned":
            pinned += sum(cost.spent(op.precision.precision or FULL))
        elif config.gated:
            steered += sum(cost.macs) * model.targets[-1] / 100
        else:
            steered += sum(cost.spent(op.precision.at(config, config.precision_stages[-1])))
    return floats / max(floats + pinned + steered, 1)


def loud_line(ops: Sequence[Op], gate_macs: int, misplaced: Sequence[str], float_cost: float) -> str:
    """One line about all of these that hold; empty if none does.

    Args:
        ops: all contractions.
        gate_macs: MACs of all gates for one sample.
        misplaced: modules that take the sequence first and get the samples there.
        float_cost: what :func:`float_share` gives; 0 under method ``float``, where everything is float on purpose.
    """
    parts = [sequence_first_words(misplaced)] if misplaced else []
    parts += [*_float(ops, float_cost), *_uncounted(ops)]
    total = sum(op.macs or 0 for op in ops)
    if gate_macs > _DEAR_GATES * total:
        parts.append(f"gates cost {100 * gate_macs / max(total, 1):.1f} % of the model's MACs, which no cp includes")
    return f"ATTENTION: {'; '.join(parts)}" if parts else ""


def _float(ops: Sequence[Op], float_cost: float) -> Iterator[str]:
    reasons: dict[str, int] = {}
    for op in ops:
        if op.precision.mode == "float":
            reasons[op.precision.reason] = reasons.get(op.precision.reason, 0) + (op.macs or 0)
    if float_cost > _MUCH_FLOAT:
        total = max(sum(op.macs or 0 for op in ops), 1)
        shares = {reason: f"{100 * macs / total:.1f}" for reason, macs in reasons.items()}
        largest = sorted(reasons, key=lambda reason: -reasons[reason])[:_NAMED]
        words = ", ".join(f"{shares[reason]} % of the MACs: {reason}" for reason in largest if shares[reason] != "0.0")
        yield f"ops that stay float take {100 * float_cost:.0f} % of the cost ({words}); a pin gives them bits"


def _uncounted(ops: Sequence[Op]) -> Iterator[str]:
    names = [op.name for op in ops if op.macs is None]
    if names:
        more = ", ..." if len(names) > _NAMED else ""
        are = "contraction is" if len(names) == 1 else "contractions are"
        yield f"{len(names)} {are} not counted in any share ({', '.join(names[:_NAMED])}{more})"
