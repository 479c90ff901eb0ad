"""What rounding one operand of one op really does to the loss, op by op, for comparison with the estimates.

The true change is the mean of the losses with the rounding error added and with it subtracted, less the loss without
it. The first-order part cancels: over a training it has no mean, because weights and activations move over their grids.
The change with the error as it is stands beside it (``plain``), and so does the divergence of the model's predictions,
which is the change for labels that are drawn from them: it has no noise of labels.

For gradients it is the change of the loss after a step, which the rounding's noise moves to either side: again the
mean of both sides, less the loss after the step without noise, divided by the square of the step's size. The noise is
scaled to a hundredth of the weights' length, because its effect at most widths is below float32's resolution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fractrain_fx.execution.plan import Call, Plan
from fractrain_fx.execution.rounded import FIRST
from fractrain_fx.numerics.sensitivity.float_copy import FloatCopy
from fractrain_fx.numerics.sensitivity.rounded import factor_error, gradient_errors, slot_of

__all__ = ["Change", "DoubleLoss", "factor_changes", "gradient_changes", "spearman"]

_STEP = 0.01  # length of a step along the noise, as a share of the weights' length
Key = tuple[str, int]


class Change(NamedTuple):
    """A true change of the loss: with the error as it is, and the mean of both signs.

    ``divergence`` of the predictions (Kullback-Leibler, in nats) is a mean of both signs too; 0 if it is not measured.
    """

    plain: float
    even: float
    divergence: float


class DoubleLoss:
    """Cross-entropy in double precision: at six bits an op changes it by less than a float's last place.

    Args:
        logits: takes them from the model's output.

    Attributes:
        log_probabilities: of the last batch.
    """

    log_probabilities: Tensor

    def __init__(self, logits: Callable[[Any], Tensor]) -> None:
        self._logits = logits

    def __call__(self, output: Any, targets: Tensor) -> Tensor:
        self.log_probabilities = self._logits(output).flatten(0, -2).double().log_softmax(-1)
        return F.nll_loss(self.log_probabilities, targets.flatten())


@torch.no_grad()
def factor_changes(
    copied: FloatCopy,
    operand: Literal["x", "w"],
    widths: Sequence[int],
    batches: Sequence[Any],
    criterion: DoubleLoss | None = None,
    every: int = 1,
) -> dict[Key, Change]:
    """The change for each op and width of an activation or a weight, as a mean over batches.

    Args:
        copied: of the model, made with ``criterion``.
        operand: which is rounded.
        widths: in bits.
        batches: those whose loss is measured.
        criterion: gives the loss. Without one there is no divergence.
        every: measure the first of so many ops.
    """
    names = [*copied.probes][::every]
    changes: dict[Key, list[Change]] = {(name, bits): [] for name in names for bits in widths}
    for batch in batches:
        base, outputs = _outputs(copied, batch)
        predicted = None if criterion is None else criterion.log_probabilities
        for name, probe in copied.probes.items():  # in the order of the graph
            for bits in widths if name in names else ():
                both, diverged = [], 0.0
                for sign in (1, -1):
                    probe.on_forward = _rounding(operand, bits, sign)
                    both.append(float(copied.loss(batch)) - base)
                    if criterion is not None and predicted is not None:
                        diverged += float(_divergence(criterion.log_probabilities, predicted))
                changes[name, bits].append(Change(both[0], sum(both) / 2, diverged / 2))
            probe.on_forward, probe.known = None, outputs[name]
        copied.release()
    return {
        key: Change(*(sum(column) / len(batches) for column in zip(*pairs, strict=True)))
        for key, pairs in changes.items()
    }


def _divergence(found: Tensor, expected: Tensor) -> Tensor:
    return F.kl_div(found, expected, reduction="batchmean", log_target=True)


def _outputs(copied: FloatCopy, batch: Any) -> tuple[float, dict[str, Tensor]]:
    """The loss of a batch, and what each op gives: those before a changed one give the same again."""
    copied.release()
    outputs: dict[str, Tensor] = {}

    def keep(name: str, output: Tensor) -> None:
        outputs[name] = output.clone()

    for name, probe in copied.probes.items():
        probe.on_output = partial(keep, name)
    loss = float(copied.loss(batch))
    copied.release()
    return loss, outputs


def _rounding(operand: Literal["x", "w"], bits: int, sign: int) -> Callable[[Plan, Call], tuple[Tensor, Tensor]]:
    def factors(plan: Plan, call: Call) -> tuple[Tensor, Tensor]:
        slot = slot_of(plan, operand)
        error = sign * factor_error(plan, call, slot, bits)
        return (call.a + error, call.b) if slot == FIRST else (call.a, call.b + error)

    return factors


def gradient_changes(
    copied: FloatCopy,
    widths: Sequence[int],
    step_batch: Any,
    batches: Sequence[Any],
    rate: float,
    seeds: Sequence[int] = (0,),
    every: int = 1,
) -> dict[Key, float]:
    """The change of the loss after a step of size 1, for each op and width of an output gradient.

    Args:
        copied: of the model.
        widths: in bits.
        step_batch: gives the step.
        batches: those whose loss is measured.
        rate: size of the step at whose end the loss is measured.
        seeds: of the noise, over which the change is averaged.
        every: measure the first of so many ops.
    """
    copied.release()
    exact = copied.gradients(step_batch)
    size = _length({name: copied.parameters[name].detach() for name in exact})
    with torch.no_grad(), copied.moved(exact, -rate):
        base = [float(copied.loss(batch)) for batch in batches]
    changes: dict[Key, float] = {}
    for name in [*copied.probes][::every]:
        probe = copied.probes[name]
        for bits in widths:
            total = 0.0
            for seed in seeds:
                probe.on_backward = _noise(bits, seed)
                noisy = copied.gradients(step_batch)
                probe.release()
                noise = {weight: gradient - exact[weight] for weight, gradient in noisy.items()}
                scale = _STEP * size / max(_length(noise), 1e-30)
                for sign in (scale, -scale):
                    step = {weight: sign * difference - rate * exact[weight] for weight, difference in noise.items()}
                    with torch.no_grad(), copied.moved(step, 1.0):
                        losses = [float(copied.loss(batch)) for batch in batches]
                    total += sum(map(float.__sub__, losses, base)) / len(base) / scale**2
            changes[name, bits] = total / 2 / len(seeds)
    return changes


def _noise(bits: int, seed: int) -> Callable[[Plan, Call, Tensor], tuple[Tensor, Tensor]]:
    def gradients(plan: Plan, call: Call, g: Tensor) -> tuple[Tensor, Tensor]:
        errors = gradient_errors(plan, call, g, bits, torch.tensor(1_000_003 + seed))
        return g + errors.by_second, g + errors.by_first

    return gradients


def _length(tensors: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors.values()))


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """The rank correlation of two lists."""
    ranks = [torch.tensor(values, dtype=torch.float64).argsort().argsort().double() for values in (first, second)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])
