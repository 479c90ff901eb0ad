"""What a block's bits do to the loss of a trained model, beside what its gate is told by each kind of gradient."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from benchmarks.page import markdown_table
from benchmarks.science.fixed import given, options_of
from fractrain_fx import FracModel
from fractrain_fx.config import GateGradient
from fractrain_fx.nn.cost import gated_meter
from fractrain_fx.training import RunSettings, Trainer, build_trainer, resume_run
from fractrain_fx.training.data.loader import Share, make_loader

__all__ = ["Told", "told", "told_table"]

_BATCH = 250


class Told(NamedTuple):
    """Changes of the mean loss, in nats, from the last option to each other one, in one block at a time.

    Attributes:
        blocks: names of the rows.
        options: names of the columns.
        changes: measured: the block computes at that option for all samples, the others as they choose.
        errors: standard errors of ``changes``, over the samples.
        told: what the gradient of the choices says instead, for each kind of gradient.
    """

    blocks: tuple[str, ...]
    options: tuple[str, ...]
    changes: Float[Tensor, "blocks options"]
    errors: Float[Tensor, "blocks options"]
    told: dict[str, Float[Tensor, "blocks options"]]


def told(folder: Path, samples: int = 2000) -> Told:
    """Measure it on augmented training samples, in evaluation mode, for the options of a finished run that round.

    Args:
        folder: of the run.
        samples: how many, in whole batches of up to 250.
    """
    trainer = resume_run(folder)
    batches = _batches(trainer, samples)
    meter = gated_meter(trainer.model)
    assert meter is not None, "the run has gates"
    options = trainer.model.frac_config.gate_options
    rounding = [number for number, option in enumerate(options) if not option.skips]
    with torch.no_grad():
        own = options_of(trainer.model.eval(), [inputs for inputs, _ in batches])
        found = torch.zeros(len(meter.blocks), len(rounding), own.shape[1])
        for block in range(len(meter.blocks)):
            for column, number in enumerate(rounding):
                forced = own.clone()
                forced[block] = number
                with given(trainer.model, forced):
                    found[block, column] = torch.cat([_losses(trainer.model, *batch) for batch in batches])
    changes = (found - found[:, -1:])[:, :-1]
    said = {kind: _said(folder, trainer.model, kind, batches)[:, rounding] for kind in get_args(GateGradient)}
    return Told(
        tuple(meter.blocks),
        tuple(str(options[number]) for number in rounding[:-1]),
        changes.mean(2),
        changes.std(2) / changes.shape[2] ** 0.5,
        {kind: (each - each[:, -1:])[:, :-1] for kind, each in said.items()},
    )


def told_table(found: Told) -> str:
    """A row for each block and option, in thousandths of a nat."""
    rows = [
        (
            *(block, option, f"{1e3 * found.changes[row, column]:.1f}", f"{1e3 * found.errors[row, column]:.1f}"),
            *(f"{1e3 * each[row, column]:.1f}" for each in found.told.values()),
        )
        for row, block in enumerate(found.blocks)
        for column, option in enumerate(found.options)
    ]
    return markdown_table(("block", "option", "change of the loss", "its error", *found.told), rows, text_columns=2)


def _batches(trainer: Trainer, samples: int) -> list[tuple[Tensor, Tensor]]:
    size = min(_BATCH, samples, len(trainer.data.train))
    loader = make_loader(trainer.data, Share(size, 0, torch.device("cpu")))
    return list(islice(loader.train(0, loader.steps), samples // size))


def _losses(model: FracModel, inputs: Tensor, targets: Tensor) -> Float[Tensor, " batch"]:
    """The loss of each sample; for texts the mean over its tokens."""
    logits = model(inputs)
    each = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
    return each.view(len(targets), -1).mean(1)


def _said(
    folder: Path, trained: FracModel, kind: GateGradient, batches: list[tuple[Tensor, Tensor]]
) -> Float[Tensor, "blocks options"]:
    """The gradient of the mean loss in every option of every block, summed over the samples."""
    settings = RunSettings.from_yaml(folder / "config.yaml")
    gate = replace(settings.frac.gate, gradient=kind)
    model = build_trainer(replace(settings, frac=settings.frac.replace(gate=gate))).model
    model.load_state_dict(trained.state_dict())
    model.eval()
    sums = []
    for inputs, targets in batches:
        losses = _losses(model, inputs, targets)
        choices = list(model.cost.choice.values())
        grads = torch.autograd.grad(losses.mean(), choices)
        sums.append(torch.stack([each.sum(0) for each in grads]))
    return torch.stack(sums).mean(0)
