"""Sums of one epoch, kept on the device so that no training step waits for the host."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fractrain_fx.engine.distributed import is_first, sum_over_ranks
from fractrain_fx.errors import NonFiniteLossError, next_sentence
from fractrain_fx.nn.cost import Cost

__all__ = ["EpochMeter", "EpochSums", "refuse_bad_step", "require_finite"]

_STEERED = ("cp", "fw", "eb", "gc")
"""The shares of the cost of the ops that ``cp`` is over."""


@dataclass(frozen=True)
class EpochSums:
    """Means over the samples of an epoch, over all processes.

    In a share of cost samples weigh by the MACs that it is a share of.

    ``loss`` is the mean task loss, over labels where the loop counts them; NaN or infinite if that of a step was. It is
    the mean over ``weight`` samples or labels, and NaN if that is 0. ``shares`` has ``cp``, ``cp_total``, ``fw``,
    ``eb`` and ``gc``, each 0..1; it is empty if no step had a cost. ``macs`` are the full-precision MACs of training on
    a sample, and ``steered`` is the share of them that the ops of ``cp`` take; 0 then. ``options`` has, for each block,
    the share of samples that chose each option. ``bad_step`` is the first step of this process, counted from 1, whose
    loss was not finite; 0 for none.
    """

    loss: float
    weight: float
    cost_term: float
    shares: dict[str, float]
    macs: float
    steered: float
    options: dict[str, tuple[float, ...]]
    samples: int
    bad_step: int


class EpochMeter:
    """Adds up loss, cost and choices of the steps of an epoch; ``first`` steps came before the first that is added."""

    def __init__(self, first: int = 0) -> None:
        self.steps = 0
        self._first = first
        self._sums: Tensor | None = None
        self._bad_step: Tensor | None = None
        self._choices: Tensor | None = None
        self._widths: dict[str, int] = {}

    def add(
        self,
        loss: Float[Tensor, ""],
        cost: Cost | None,
        samples: int,
        cost_term: Float[Tensor, ""] | None = None,
        labels: Float[Tensor, ""] | None = None,
    ) -> None:
        """Take one step: its mean task loss, its cost, the number of samples, and the cost term if any.

        Either all steps have a cost, or none: then there are no shares and no options. The loss weighs by ``labels``,
        the number that it is the mean over, or by the samples if they are not given.
        """
        self.steps += 1
        loss = loss.detach()
        dtype = torch.float32 if loss.device.type == "mps" else torch.float64  # MPS has no doubles
        added = torch.zeros_like(loss) if cost_term is None else cost_term.detach()
        costs = []
        if cost is not None:
            steered = [getattr(cost, name).detach() for name in _STEERED]
            costs = [cost.macs, cost.cp_total.detach(), cost.steered_macs, *steered]
        one = weight = torch.ones_like(loss)
        if labels is not None:
            weight = labels.reshape(()).to(loss.device, dtype) / max(samples, 1)
            loss = torch.where(weight > 0, weight * loss, 0)  # the mean loss of no labels is NaN
        values = [loss, added, one, weight, *costs]
        stacked = torch.stack([value.to(loss.device) for value in values]).to(dtype)
        if costs:
            stacked[-len(costs) + 1].mul_(stacked[-len(costs)])
            stacked[-len(_STEERED) :].mul_(stacked[-len(_STEERED) - 1])
        if self._sums is None:
            self._sums = samples * stacked if samples else torch.zeros_like(stacked)
        elif samples:  # not 0 times NaN
            self._sums = self._sums.to(stacked).add(stacked, alpha=samples)
        number = self._first + self.steps if samples else 0  # the mean loss of no samples is NaN
        bad = torch.ne(loss - loss, 0) * number  # NaN unless the loss is finite
        self._bad_step = (
            bad if self._bad_step is None else torch.where(self._bad_step.to(bad) > 0, self._bad_step.to(bad), bad)
        )
        if cost is not None and cost.choice:
            chosen = torch.cat([choice.detach() for choice in cost.choice.values()], dim=1).sum(0, dtype=dtype)
            self._choices = chosen if self._choices is None else self._choices.to(chosen) + chosen
            self._widths = {block: choice.shape[1] for block, choice in cost.choice.items()}

    def state_dict(self) -> dict[str, Any]:
        """Plain values (JSON) that continue this epoch. A collective, because it sums over all processes."""
        if self._sums is None:
            raise ValueError("an epoch without steps has no state")
        choices = None if self._choices is None else sum_over_ranks(self._choices.clone()).tolist()
        # JSON has no NaN; bad_step tells that the loss was not finite.
        sums = [value if math.isfinite(value) else None for value in sum_over_ranks(self._sums.clone()).tolist()]
        return {
            "steps": self.steps,
            "sums": sums,
            "bad_step": self.bad_step(),
            "choices": choices,
            "widths": self._widths,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue an epoch. The first process takes the sums of all processes, the others start from 0."""
        mine = float(is_first())
        self.steps = int(state["steps"])
        sums = [math.nan if value is None else mine * value for value in state["sums"]]
        self._sums = torch.tensor(sums, dtype=torch.float64)
        self._bad_step = torch.tensor(int(state["bad_step"]))
        self._widths = {block: int(width) for block, width in state["widths"].items()}
        if state["choices"] is not None:
            self._choices = torch.tensor(state["choices"], dtype=torch.float64) * mine

    def bad_step(self) -> int:
        """The first step of this process with a loss that is not finite, or 0. Waits for the device."""
        return 0 if self._bad_step is None else int(self._bad_step.item())

    def read(self) -> EpochSums:
        """Means so far over all processes; a collective. Waits for the device."""
        if self._sums is None:
            raise ValueError("an epoch without steps has no means")
        bad_step = self.bad_step()
        loss, cost_term, samples, weight, *costs = sum_over_ranks(self._sums.clone()).tolist()
        divisor = samples or 1  # steps without samples cost nothing
        options: dict[str, tuple[float, ...]] = {}
        if self._choices is not None:
            counts = sum_over_ranks(self._choices.clone()) / divisor
            split = counts.split(list(self._widths.values()))
            options = {block: tuple(part.tolist()) for block, part in zip(self._widths, split, strict=True)}
        macs, total, steered, *spent = costs or (0.0, 0.0, 0.0)
        shares = {name: value / (steered or 1) for name, value in zip(_STEERED, spent, strict=False)}
        return EpochSums(
            loss=loss / weight if weight else math.nan,
            weight=weight,
            cost_term=cost_term / divisor,
            shares={**shares, "cp_total": total / (macs or 1)} if costs else {},
            macs=macs / divisor,
            steered=steered / (macs or 1),
            options=options,
            samples=round(samples),
            bad_step=bad_step,
        )


def refuse_bad_step(step: int, stretch: str, model: Any = None) -> None:
    """Refuse a stretch of steps, such as ``of epoch 3``, of which ``step`` (from 1) has a loss that is not finite.

    0 stands for no such step. If the model is watched, the message names the op that was first out.
    """
    if step:
        raise NonFiniteLossError(
            f"the task loss of step {step} {stretch} was NaN or infinite: the stage stays. Go back to the last "
            "checkpoint and lower the learning rate, or check this batch's data" + _seen(model)
        )


def require_finite(sums: EpochSums, stretch: str, model: Any) -> None:
    """Refuse a mean loss that is not finite, as :func:`refuse_bad_step`; all processes do, whichever had the loss."""
    if not math.isfinite(sums.loss):
        refuse_bad_step(sums.bad_step, stretch, model)
        raise NonFiniteLossError(f"a task loss {stretch} was NaN or infinite in another process")


def _seen(model: Any) -> str:
    """What a watched model's last watched step shows, as a sentence that may follow a message."""
    describe = getattr(model, "describe_watched", None)
    return next_sentence(None if describe is None else describe())
