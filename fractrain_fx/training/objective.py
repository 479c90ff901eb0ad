"""The loss of a task, and the measure of its result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fractrain_fx.capture.state import in_mode
from fractrain_fx.errors import InputError, ModelError
from fractrain_fx.training.data import DataSet
from fractrain_fx.training.models import BuiltModel

__all__ = ["Objective", "check_outputs"]

_IGNORED = -100  # the target that torch's cross-entropy leaves out


@dataclass(frozen=True)
class Objective:
    """Cross-entropy, and accuracy (per cent) for classification or perplexity (its exponential) for language.

    Attributes:
        metric: name of the measure; ``accuracy`` is better where it is higher, ``perplexity`` where it is lower.
    """

    metric: Literal["accuracy", "perplexity"]

    @classmethod
    def of(cls, data: DataSet) -> Objective:
        """The objective of a data set's task."""
        return cls("accuracy" if data.task == "classification" else "perplexity")

    def loss(self, logits: Float[Tensor, "*batch classes"], targets: Int[Tensor, "*batch"]) -> Float[Tensor, ""]:
        """Mean cross-entropy over samples (and positions)."""
        return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())

    def criterion(self, output: Any, targets: Int[Tensor, "*batch"]) -> Float[Tensor, ""]:
        """The loss of a model's output.

        Raises:
            InputError: it has no logits.
        """
        return self.loss(self.logits(output), targets)

    @staticmethod
    def sums(logits: Float[Tensor, "*batch classes"], targets: Int[Tensor, "*batch"]) -> Float[Tensor, " sums"]:
        """The summed cross-entropy of a batch, its right answers and its targets, which add up over batches."""
        logits, targets = logits.flatten(0, -2).float(), targets.flatten()
        loss = F.cross_entropy(logits, targets, reduction="sum")
        return torch.stack([loss, (logits.argmax(-1) == targets).sum(), (targets != _IGNORED).sum()])

    def read(self, sums: Float[Tensor, " sums"]) -> tuple[float, float]:
        """The mean loss and the measure of all batches from their ``sums``."""
        loss, (_, right, targets) = sums[0] / sums[2], sums.tolist()
        return float(loss), 100 * right / targets if self.metric == "accuracy" else float(loss.exp())

    def better(self, new: float, old: float | None) -> bool:
        """Whether ``new`` is finite and better than ``old``, or ``old`` is ``None``."""
        if old is None or not math.isfinite(new):
            return math.isfinite(new)
        return new > old if self.metric == "accuracy" else new < old

    @staticmethod
    def logits(output: Any) -> Float[Tensor, "*batch classes"]:
        """The logits in the output of a model.

        Raises:
            InputError: it has no logits.
        """
        if isinstance(output, Mapping):
            output = output.get("logits")
        elif isinstance(output, tuple | list):
            output = output[0]
        elif not isinstance(output, Tensor):
            output = getattr(output, "logits", None)
        if not isinstance(output, Tensor):
            raise InputError("the model returned no logits: return a tensor, or an output with a field named 'logits'")
        return output


def check_outputs(name: str, built: BuiltModel) -> None:
    """Check that a model from a user's file has an output for each class or token of its data.

    Raises:
        ModelError: it has another number of outputs, of which the loss would say less.
        InputError: it returns no logits.
    """
    if not name.rpartition(":")[0].endswith(".py"):
        return
    args, kwargs = built.examples()
    model, data = built.model, built.data
    with torch.no_grad(), torch.random.fork_rng(devices=[]), in_mode(model, training=False):
        try:
            output = model(*args, **kwargs)
        except Exception:
            return  # recording the model fails as well, and says where
    count, classification = Objective.logits(output).shape[-1], data.task == "classification"
    if count < data.classes or (classification and count != data.classes):  # a vocabulary may be padded
        what, argument = ("classes", "num_classes") if classification else ("tokens", "vocab_size")
        raise ModelError(
            f"{name} has {count} outputs, and {data.name!r} has {data.classes} {what}: return a model of "
            f"{data.classes} outputs (the function gets {argument}={data.classes} if it takes {argument})"
        )
