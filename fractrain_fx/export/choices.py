"""One option for each gated block, and what it costs to take that instead of asking the gates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fractrain_fx.capture import call_of
from fractrain_fx.errors import ExportError
from fractrain_fx.export.result import FixedChoices

__all__ = ["commonest", "measured"]

_LABELS = (
    "choices='commonest' measures what it costs to fix the choices, so its batches need labels: pairs (input, label), "
    "or mappings of keyword arguments with which the model returns a loss"
)


@torch.no_grad()
def commonest(model: nn.Module, batches: Sequence[Any]) -> tuple[dict[str, int], dict[str, float]]:
    """For each gated block the option that most samples choose, and the share (0..1) that do.

    Args:
        model: a rewritten model in evaluation mode.
        batches: pairs of input and label, or mappings of keyword arguments.
    """
    counts: dict[str, Tensor] = defaultdict(lambda: torch.zeros(()))
    for batch in batches:
        _output_of(model, batch)
        cost: Any = model.cost
        for block, choice in cost.choice.items():
            counts[block] = counts[block] + choice.sum(0, dtype=torch.float32).cpu()
    options = {block: int(count.argmax()) for block, count in counts.items()}
    return options, {block: float(count.max() / count.sum()) for block, count in counts.items()}


@torch.no_grad()
def measured(
    gated: nn.Module,
    fixed: nn.Module,
    batches: Sequence[Any],
    options: tuple[Mapping[str, int], Mapping[str, float]],
) -> FixedChoices:
    """What fixed options cost, by accuracy, or by loss if the model returns one.

    Raises:
        ExportError: the batches have no labels.
    """
    scores = [torch.zeros(3), torch.zeros(3)]
    measure = ""
    for batch in batches:
        for total, model in zip(scores, (gated, fixed), strict=True):
            measure, score = _score(_output_of(model, batch), batch)
            total += score
    (before, after), samples = ([float(total[0] / total[1]) for total in scores], int(scores[0][2]))
    return FixedChoices(*options, measure, before, after, samples)


def _output_of(model: nn.Module, batch: Any) -> Any:
    args, kwargs = call_of(batch)
    return model(*args, **kwargs)


def _score(output: Any, batch: Any) -> tuple[str, Tensor]:
    """The measure's name; the sum over samples, the weight that divides it, and the number of samples."""
    if isinstance(batch, Mapping):
        loss = getattr(output, "loss", None)
        if loss is None:
            raise ExportError(_LABELS)
        samples = len(next(x for x in batch.values() if isinstance(x, Tensor)))
        return "loss", torch.tensor([float(loss) * samples, samples, samples])
    if not isinstance(batch, tuple | list) or len(batch) < 2 or not isinstance(output, Tensor):
        raise ExportError(_LABELS)
    right = (output.argmax(-1) == batch[1]).float()
    return "accuracy", torch.tensor([100 * float(right.sum()), right.numel(), len(batch[0])])
