"""How much of the final difference between a rewritten model and its float twin comes from each op."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fractrain_fx.capture.trees import tensors_in
from fractrain_fx.numerics.records import OperandRecord
from fractrain_fx.numerics.twin import Pass, Twin

__all__ = ["difference", "distance", "estimated_shares", "outputs_of", "switched_shares", "weights_of"]


Shares = tuple[dict[str, float], dict[str, float]]  # of the output and of the weights' gradients, by op


def switched_shares(twin: Twin, rounds: list[str], rounded: Pass, exact: Pass) -> Shares:
    """How much smaller the squared differences get if an op runs in float, as shares of all that they get smaller."""
    less: Shares = {}, {}
    whole = [_squared(*pair(rounded, exact)) for pair in (outputs_of, weights_of)]
    for name in rounds:
        one = twin.run([name], rounded.choices)
        for drops, before, pair in zip(less, whole, (outputs_of, weights_of), strict=True):
            drops[name] = max(before - _squared(*pair(one, exact)), 0.0)
    return _as_shares(less[0]), _as_shares(less[1])


def estimated_shares(rounds: list[str], rounded: Pass, records: tuple[OperandRecord, ...]) -> Shares:
    """Each op's own error: of the output times its gradient, squared; of the weight's gradient by its operands'."""
    outputs = {name: float(rounded.local[name]) for name in rounds if name in rounded.local}
    errors: dict[str, float] = {}
    for record in records:
        if "GC" in record.products:
            errors[record.op] = errors.get(record.op, 0.0) + record.statistics.error**2
    sizes = {name: rounded.weights.get(f"{name}.weight") for name in rounds}
    gradients = {name: errors.get(name, 0.0) * float(g.square().sum()) for name, g in sizes.items() if g is not None}
    return _as_shares(outputs), _as_shares(gradients)


def _as_shares(parts: Mapping[str, float]) -> dict[str, float]:
    finite = {name: part if part < float("inf") else 0.0 for name, part in parts.items()}  # NaN compares false
    total = sum(finite.values())
    return {name: part / total if total else 0.0 for name, part in finite.items()}


def outputs_of(one: Pass, other: Pass) -> tuple[list[Tensor], list[Tensor]]:
    """The float tensors in the model's output, in two passes."""
    first, second = ([x.detach() for x in tensors_in(run.output) if x.is_floating_point()] for run in (one, other))
    return first, second


def weights_of(one: Pass, other: Pass) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of the parameters, in two passes."""
    names = [name for name in one.weights if name in other.weights]
    return [one.weights[name] for name in names], [other.weights[name] for name in names]


def _squared(ours: list[Tensor], theirs: list[Tensor]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return float(sum((torch.linalg.vector_norm((a - b).double()) ** 2 for a, b in pairs), torch.zeros(())))


def distance(ours: list[Tensor], theirs: list[Tensor]) -> float | None:
    """The norm of a difference, relative to that of ``theirs``; ``None`` if that is 0."""
    size = _squared(theirs, [torch.zeros_like(x) for x in theirs])
    return (_squared(ours, theirs) / size) ** 0.5 if size else None


def difference(ours: Tensor | None, theirs: Tensor | None) -> float | None:
    """The same of two tensors; ``None`` if one is missing."""
    return None if ours is None or theirs is None else distance([ours], [theirs])
