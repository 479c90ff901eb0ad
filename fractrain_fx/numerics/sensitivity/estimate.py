"""Second-order estimates of what rounding each operand does to the loss, from a few passes over a batch.

The curvature is the empirical Fisher information: for a loss that is the mean of N terms, a change ``d`` adds
``N / 2 * sum_i <g_i, d>^2``, with ``g_i`` the gradient of sample i's part of the loss.

Activations and weights: ``d`` is the rounding error ``Q(x) - x``, and ``<g_i, d>`` is summed over the whole sample, so
that errors which point the same way add up.

Gradients: rounding adds noise to the output gradient of an op, and so to the gradient of the op's weight and of every
weight before it. Backward is linear in that noise. Its transpose is the derivative of the op's output along a step of
the weights. For a step ``u`` that differs from batch to batch like a batch's gradient, ``N * u u^T`` is the curvature
on average, and noise of variance ``v`` adds ``N / 2 * sum(v * (dy/du)^2)`` to the loss after a step of size 1. One pair
of forward passes gives ``dy/du`` of all ops.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from glob import escape
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from fractrain_fx.errors import InputError, ModelError
from fractrain_fx.execution.arithmetic import Bound
from fractrain_fx.execution.plan import Call, Plan, contract
from fractrain_fx.execution.rounded import FIRST
from fractrain_fx.numerics.sensitivity.float_copy import FloatCopy
from fractrain_fx.numerics.sensitivity.rounded import OperandName, factor_error, gradient_errors, slot_of

__all__ = ["LEAST", "Estimates", "Widths"]

LEAST = 4
"""The fewest batches: two independent differences between batches."""

_TOLD = 3  # ops that an error names
_NUDGE = 2e-3  # length of a finite difference, as a share of the length of all weights
_CANCELLED = 1e-4  # the sum of numbers, beside the sum of their sizes, that counts as zero in float32
_SAME = 1e-3  # length of a difference of gradients, beside their own, below which it is rounding of float32

Widths = Mapping[str, Sequence[int]]
"""The widths of each op."""
Key = tuple[str, OperandName, int]
Backward = tuple[Plan, Call, Tensor]
"""An op, its call and the gradient of its output, as its backward pass saw them."""


class Estimates:
    """Means over batches, at least :data:`LEAST` of equal size; ``seed`` is that of the gradients' rounding.

    No two batches may have the same gradient, and the loss must depend on each op.
    """

    def __init__(self, copied: FloatCopy, widths: Widths, batches: Sequence[Any], seed: int) -> None:
        self._copied, self._widths = copied, widths
        self._random = torch.Generator().manual_seed(seed)
        self._change: dict[Key, float] = defaultdict(float)
        self._variance: dict[Key, float] = defaultdict(float)
        gradients, losses = [], []
        for batch in batches:
            gradients.append(copied.gradients(batch))
            losses.append(copied.last_loss)
        self.loss = sum(losses) / len(losses)
        """The mean loss in float."""
        self._batches = len(batches)
        products = _products(gradients)
        _refuse_same(products)
        self._seen: set[str] = set()
        for number, batch in enumerate(batches):
            # Of other samples: a sample's own gradient overlaps with its own noise far more.
            step = _difference(gradients, (number + 1) % len(batches), (number + 2) % len(batches))
            self._add(batch, step)
        self._refuse_unseen()
        terms = sum(map(copied.terms, batches)) / len(batches)
        self._batch_harm = terms / 2 * _mean_square(products)
        # The variance between batches, summed over a weight's values.
        self._batch_variance = {
            name: float(torch.stack(values).var(0).sum()) for name, values in _values(gradients).items()
        }

    def change(self, op: str, operand: OperandName, bits: int) -> float:
        """The expected change of the loss, for an activation or a weight."""
        return self._change[op, operand, bits] / self._batches

    def noise(self, op: str, bits: int) -> float:
        """The harm of a gradient's rounding in a step, as a share of the harm of the batch's own noise."""
        return self._change[op, "g", bits] / self._batches / self._batch_harm if self._batch_harm else 0.0

    def variances(self, op: str, bits: int) -> tuple[float, float] | None:
        """The variance that rounding adds to the gradient of the op's weight, and that which the batch has.

        Both are summed over the weight's values; ``None`` for an op without a trained weight.
        """
        weight = self._copied.weights.get(op)
        if weight not in self._batch_variance:
            return None
        return self._variance[op, "g", bits] / self._batches, self._batch_variance[weight]

    def _add(self, batch: Any, step: Mapping[str, Tensor]) -> None:
        copied, backwards = self._copied, dict[str, Backward]()
        copied.release()
        for name, probe in copied.probes.items():

            def look(plan: Plan, call: Call, g: Tensor, name: str = name) -> tuple[Tensor, Tensor]:
                backwards[name] = plan, call, g
                return g, g

            probe.on_backward = look
        copied.gradients(batch)
        copied.release()
        slopes, terms = self._slopes(batch, step), copied.terms(batch)
        self._seen.update(backwards)
        for name, backward in backwards.items():
            for operand in ("x", "w"):
                self._factor(name, operand, backward, terms)
            self._gradient(name, backward, slopes[name], terms)

    def _refuse_unseen(self) -> None:
        """Raise a ``ModelError`` for ops that no gradient of the loss has reached, of which nothing is known."""
        unseen = [name for name in self._copied.probes if name not in self._seen]
        if unseen:
            rules = ", ".join(f"Pin({escape(name)!r}, format='float')" for name in unseen[:_TOLD])
            more = f" and {len(unseen) - _TOLD} more" if len(unseen) > _TOLD else ""
            raise ModelError(
                f"no gradient of the loss reaches {', '.join(map(repr, unseen[:_TOLD]))}{more}, so what rounding does "
                "there is not known. Such ops lie in a branch that the loss leaves out, or under no_grad or detach: "
                f"let them stay float by rules in pins=[{rules}{', ...' if more else ''}]"
            )

    @torch.no_grad()
    def _factor(self, name: str, operand: OperandName, backward: Backward, terms: int) -> None:
        plan, call, g = backward
        slot, samples = slot_of(plan, operand), self._copied.samples
        factor, other = (plan.first, call.b) if slot == FIRST else (plan.second, call.a)
        of_x = None if factor.weight else _gradient_of(plan, call, g, slot)
        for bits in self._widths[name]:
            error = factor_error(plan, call, slot, bits)
            if of_x is None:
                pair = (error, other) if slot == FIRST else (other, error)
                still = call._replace(added=None if call.added is None else torch.zeros_like(call.added))
                errors = _without_normalised(contract(plan, still, *pair), g, contract(plan, call, call.a, call.b))
                parts, axis = errors * g, plan.axis
            else:
                parts, axis = error * of_x, factor.axis
            sums = axis.at(parts.shape, samples).samples_first(parts, samples).sum(1)
            self._change[name, operand, bits] += terms / 2 * float(sums.square().sum())

    def _slopes(self, batch: Any, step: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """For each op, the derivative of its output along a step of the weights."""
        copied = self._copied
        length = math.sqrt(sum(float(tensor.square().sum()) for tensor in step.values()))
        size = math.sqrt(sum(float(copied.parameters[name].detach().square().sum()) for name in step))
        nudge = _NUDGE * size / length if length else 0.0
        outputs: dict[str, Tensor] = {}
        for sign in (1, -1):
            for name, probe in copied.probes.items():

                def look(out: Tensor, name: str = name, sign: int = sign) -> None:
                    outputs[name] = out.detach().clone() if sign > 0 else outputs[name].sub_(out)

                probe.on_output = look
            with torch.no_grad(), copied.moved(step, sign * nudge):
                copied.loss(batch)
        copied.release()
        return {name: slope.div_(2 * nudge) if nudge else slope.zero_() for name, slope in outputs.items()}

    @torch.no_grad()
    def _gradient(self, name: str, backward: Backward, slope: Tensor, terms: int) -> None:
        plan, call, g = backward
        slot = slot_of(plan, "w")
        for bits in self._widths[name]:
            seed = torch.randint(2**31, (), generator=self._random).to(g.device)
            errors = gradient_errors(plan, call, g, bits, seed)
            of_weight = errors.by_second if slot == FIRST else errors.by_first
            squares = (errors.by_first.square() + errors.by_second.square()) / 2
            self._change[name, "g", bits] += terms / 2 * float((squares * slope.square()).sum())
            if name in self._copied.weights:
                gradient = _gradient_of(plan, call, of_weight, slot)
                self._variance[name, "g", bits] += float(gradient.square().sum())


def _gradient_of(plan: Plan, call: Call, g: Tensor, slot: int) -> Tensor:
    """The gradient of a factor."""
    bound = Bound(call.a.to(g.dtype), call.b.to(g.dtype), call.added, plan.static)
    needs = (slot == FIRST, slot != FIRST, False)
    gradient = plan.arithmetic.backward(g, bound, needs)[0 if slot == FIRST else 1]
    assert gradient is not None
    return gradient


def _without_normalised(parts: Tensor, g: Tensor, y: Tensor) -> Tensor:
    """Output errors less the share that batch normalisation removes: in each channel, the mean and the scale.

    No gradient sums to zero over a channel by chance, or over its products with the output.
    """
    dims = [dim for dim in range(y.ndim) if dim != 1]
    if y.ndim < 2 or not _cancels(g, dims):
        return parts
    parts, y = (x - x.mean(dims, keepdim=True) for x in (parts, y))
    if not _cancels(g * y, dims):
        return parts
    return parts - y * ((parts * y).sum(dims, keepdim=True) / y.square().sum(dims, keepdim=True).clamp(min=1e-30))


def _cancels(x: Tensor, dims: list[int]) -> bool:
    return bool((x.sum(dims).abs() <= _CANCELLED * x.abs().sum(dims)).all())


Gradients = Sequence[Mapping[str, Tensor]]


def _difference(gradients: Gradients, first: int, second: int) -> dict[str, Tensor]:
    """A step that has the variance of a batch's gradient, and no mean."""
    return {name: (gradient - gradients[second][name]) / math.sqrt(2) for name, gradient in gradients[first].items()}


def _values(gradients: Gradients) -> dict[str, list[Tensor]]:
    return {name: [batch[name] for batch in gradients] for name in gradients[0]}


def _products(gradients: Gradients) -> Tensor:
    """The product of every two gradients."""
    products = torch.zeros(len(gradients), len(gradients), dtype=torch.float64)
    for values in _values(gradients).values():
        rows = torch.stack([value.flatten().double() for value in values])
        products += (rows @ rows.T).cpu()
    return products


def _refuse_same(products: Tensor) -> None:
    """Raise an ``InputError`` if the gradients of two batches differ by no more than rounding."""
    for a, b in combinations(range(len(products)), 2):
        size = float(products[a, a] + products[b, b])
        if float(products[a, a] + products[b, b] - 2 * products[a, b]) < _SAME**2 * size:
            raise InputError(
                f"batches {a + 1} and {b + 1} have the same gradient, so they do not show how much it varies from "
                "batch to batch: give batches of other samples each. A run whose batch holds all samples has none: "
                "call sensitivity(model, batches) with smaller batches"
            )


def _mean_square(products: Tensor) -> float:
    """The mean square of the product of two independent differences between batches."""
    squares = []
    for a, b, c, d in combinations(range(len(products)), 4):
        for i, j, m, n in ((a, b, c, d), (a, c, b, d), (a, d, b, c)):
            squares.append(float(products[i, m] - products[i, n] - products[j, m] + products[j, n]) ** 2 / 4)
    return sum(squares) / len(squares)
