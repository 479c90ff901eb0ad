"""Run one step of a model again, by its shown graph, and look at every op."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fractrain_fx.capture import call_of
from fractrain_fx.capture.state import in_mode
from fractrain_fx.capture.trees import tensors_in
from fractrain_fx.errors import InputError, ModelError
from fractrain_fx.model import rewritten_in
from fractrain_fx.numerics.blame import blame
from fractrain_fx.numerics.criterion import Arguments, Criterion, inputs_and_targets
from fractrain_fx.numerics.observe import StepObservations, observe
from fractrain_fx.numerics.records import OperandRecord, WatchedStep
from fractrain_fx.numerics.twin import Pass, Twin

__all__ = ["examine", "observed_pass", "twin_of"]

_AGAIN = "in this step, run again"
_SHOWN = 3  # names in a message


def examine(model: Any, batch: Any, criterion: Criterion | None = None) -> str | None:
    """In a sentence, the op that a loss which is not finite, or jumps, comes from. The model stays as it is.

    Args:
        model: the rewritten model.
        batch: the batch of that step, as :func:`fractrain_fx.numerics.compare` takes it.
        criterion: the loss from output and targets, as there.

    Raises:
        InputError, ModelError: as :func:`fractrain_fx.numerics.compare`.
    """
    named = list(rewritten_in(model, "compare").named_parameters())
    bad = [name for name, p in named if not bool(torch.isfinite(p).all())]
    with twin_of(model, batch, criterion) as twin:
        _, records = observed_pass(twin, StepObservations())
    sentence = blame([WatchedStep(0, "", records)], _AGAIN)
    if 2 * len(bad) < len(named):
        return sentence
    more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    return (
        f"the weights are not finite any more ({', '.join(bad[:_SHOWN])}{more}), so an earlier step did it: train from "
        "the last checkpoint with --watch 1, or inside fractrain_fx.numerics.watch(model, every=Steps(1))"
    )


@contextlib.contextmanager
def twin_of(model: Any, batch: Any, criterion: Criterion | None) -> Iterator[Twin]:
    """The graph that a batch runs in training, with the batch; the model is in training mode meanwhile."""
    rewritten = rewritten_in(model, "compare")
    if rewritten._state.sharding is not None:
        raise ModelError("the graph is run on whole weights here: compare before fully_shard, and watch afterwards")
    with in_mode(rewritten, training=True):
        (args, kwargs), targets = inputs_and_targets(batch) if criterion is not None else _apart(batch)
        variant, values = rewritten._state.variants.choose(args, kwargs, True)
        yield Twin(variant.recording.train, values, lambda output: _loss_of(output, targets, criterion))


def observed_pass(
    twin: Twin, seen: StepObservations, *, locally: bool = False
) -> tuple[Pass, tuple[OperandRecord, ...]]:
    """A pass as the model trains, and what was seen of all its ops."""
    with observe(twin.graph_module, seen):
        result = twin.run(locally=locally)
    apart = StepObservations()
    for name in twin.ops.keys() - set(twin.rounding):
        if name in result.outputs:
            apart.add_output(name, result.outputs[name])
        if name in result.gradients:
            apart.add_output(name, result.gradients[name], "g", ("EB", "GC"))
    place = {name: index for index, name in enumerate(twin.ops)}
    return result, tuple(sorted((*seen.read(), *apart.read()), key=lambda record: place.get(record.op, len(place))))


def _apart(batch: Any) -> tuple[Arguments, Any]:
    """The arguments of the model's call, and the targets; ``None`` for a batch without."""
    return call_of(batch), batch[1] if isinstance(batch, tuple | list) and len(batch) > 1 else None


def _loss_of(output: Any, targets: Any, criterion: Criterion | None) -> Tensor:
    """The loss of a batch.

    Without ``criterion`` it is the output's own ``loss``, or cross-entropy for whole targets, or the mean squared error
    for others; without targets it is the mean square of the output.
    """
    if criterion is not None:
        return criterion(output, targets)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    floats = [x for x in tensors_in(output) if x.is_floating_point()]
    if not floats:
        raise InputError("the model's output holds no float tensor: pass criterion=lambda output, targets: ...")
    y = floats[0]
    if targets is None:
        return y.square().mean()
    if targets.is_floating_point() and targets.shape == y.shape:
        return F.mse_loss(y, targets)
    if not targets.is_floating_point() and targets.shape == y.shape[:-1]:
        return F.cross_entropy(y.flatten(0, -2), targets.flatten())
    raise InputError(
        f"no loss is known for an output of shape {tuple(y.shape)} and targets of shape {tuple(targets.shape)}: pass "
        "criterion=lambda output, targets: ..."
    )
